"""Routers and their losses (Zhang et al. 2022; Shazeer et al. 2017) against naive float64 forms."""

import pytest
import references as naive
import torch
from common import assert_same_with_gradients, hidden, randomize
from references import cv_squared

from hf_moa.modeling.core.records import LayerRecord, Record
from hf_moa.modeling.routing import losses as router_losses
from hf_moa.modeling.routing.routers import Noise, NoisyTopKRouter, TopKRouter
from hf_moa.modeling.routing.totals import router_terms


def router(kind=TopKRouter, *, experts=6, selected=2, detach=False):
    made = kind(
        hidden_size=32, num_experts=experts, num_selected=selected, detach_normalizer=detach
    ).double()
    return randomize(made)


def with_noise(made, x, mask, seed=0):
    """One noisy call, and the noise it drew."""
    torch.manual_seed(seed)
    noise = torch.randn(*x.shape[:2], made.num_experts, dtype=x.dtype)
    torch.manual_seed(seed)
    return made(x, mask), noise


def test_weights_are_the_normalised_probabilities_of_the_top_k():
    made = router(selected=3, detach=True)
    x, mask = hidden()
    routing = made(x, mask)
    p = (x @ made.gate.weight.T).softmax(-1)
    for b in range(3):
        for t in range(7):
            best = p[b, t].argsort(descending=True)[:3]
            assert routing.index[b, t].tolist() == best.tolist()
            torch.testing.assert_close(routing.weight[b, t], p[b, t, best] / p[b, t, best].sum())


def test_detached_normaliser_has_the_gradient_of_the_paper():
    x, mask = hidden()
    for detach in (True, False):
        made = router(detach=detach)
        routing = made(x, mask)
        p = (x @ made.gate.weight.T).softmax(-1).gather(-1, routing.index)
        total = p.sum(-1, keepdim=True)
        expected = p / (total.detach() if detach else total)
        assert_same_with_gradients(routing.weight, expected, [x, made.gate.weight])


@pytest.mark.parametrize("selected", [1, 2, 5, 6])
def test_noisy_top_k_equals_the_paper(selected):
    made = router(NoisyTopKRouter, selected=selected).train()
    x, mask = hidden()
    routing, noise = with_noise(made, x, mask)
    _, _, h, gates = naive.noisy_topk(x, made, noise)
    torch.testing.assert_close(routing.logits, h)
    spread = torch.zeros_like(gates).scatter(-1, routing.index, routing.weight)
    assert_same_with_gradients(spread, gates, [x, made.gate.weight, made.noise.weight])


def test_eval_draws_no_noise():
    made = router(NoisyTopKRouter).eval()
    x, mask = hidden()
    torch.testing.assert_close(made(x, mask).logits, x @ made.gate.weight.T)


@pytest.mark.parametrize("selected", [1, 2, 5])
def test_load_loss_equals_the_paper(selected):
    made = router(NoisyTopKRouter, selected=selected).train()
    x, mask = hidden()
    routing, noise = with_noise(made, x, mask)
    clean, scale, h, _ = naive.noisy_topk(x, made, noise)
    load = naive.smooth_load(clean, scale, h, selected)[mask].sum(dim=0)
    assert_same_with_gradients(
        routing.losses["router_load_loss"],
        cv_squared(load),
        [x, made.gate.weight, made.noise.weight],
    )


def test_load_is_even_where_every_expert_is_kept():
    made = router(NoisyTopKRouter, selected=6).train()
    x, mask = hidden()
    assert made(x, mask).losses["router_load_loss"] < 1e-12


def test_importance_loss_equals_the_paper():
    made = router(NoisyTopKRouter, selected=2).train()
    x, mask = hidden()
    routing, noise = with_noise(made, x, mask)
    _, _, _, gates = naive.noisy_topk(x, made, noise)
    assert_same_with_gradients(
        routing.losses["router_importance_loss"],
        cv_squared(gates[mask].sum(dim=0)),
        [x, made.gate.weight, made.noise.weight],
    )


def test_balance_and_z_losses_equal_the_paper():
    made = router(selected=3)
    x, mask = hidden()
    routing = made(x, mask)
    logits = x @ made.gate.weight.T
    assert_same_with_gradients(
        routing.losses["router_balance_loss"],
        naive.balance_loss(logits, routing.index, mask),
        [x, made.gate.weight],
    )
    assert_same_with_gradients(
        routing.losses["router_z_loss"], naive.z_loss(logits, mask), [x, made.gate.weight]
    )


def test_balance_loss_of_an_even_router_is_one():
    probabilities = torch.full((1, 12, 4), 0.25)
    index = torch.arange(24).view(1, 12, 2) % 4
    counts = router_losses.expert_counts(index, num_experts=4, mask=None)
    loss = router_losses.load_balance_loss(probabilities, router_losses.expert_load(counts), mask=None)
    assert loss.item() == pytest.approx(1.0)


def test_balance_loss_of_a_collapsed_router_is_n_over_k():
    probabilities = torch.tensor([0.5, 0.5, 0.0, 0.0]).expand(1, 12, 4)
    index = torch.tensor([0, 1]).expand(1, 12, 2)
    counts = router_losses.expert_counts(index, num_experts=4, mask=None)
    loss = router_losses.load_balance_loss(probabilities, router_losses.expert_load(counts), mask=None)
    assert loss.item() == pytest.approx(2.0)


@pytest.mark.parametrize("kind", [TopKRouter, NoisyTopKRouter])
def test_padding_counts_in_no_loss(kind):
    made = router(kind).eval()
    x, mask = hidden()
    losses = made(x, mask).losses
    changed = torch.where(mask.unsqueeze(-1), x, torch.randn_like(x))
    for name, loss in made(changed, mask).losses.items():
        torch.testing.assert_close(loss, losses[name], msg=name)
    trimmed = made(x[:1], mask[:1]).losses
    assert not torch.allclose(trimmed["router_z_loss"], losses["router_z_loss"])


@pytest.mark.parametrize("kind", [TopKRouter, NoisyTopKRouter])
def test_batch_of_padding_alone_has_finite_losses_and_gradients(kind):
    made = router(kind).train()
    x, mask = hidden()
    losses = made(x, torch.zeros_like(mask)).losses
    sum(losses.values()).backward()
    assert all(torch.isfinite(loss) for loss in losses.values())
    assert all(torch.isfinite(parameter.grad).all() for parameter in made.parameters())


def test_load_loss_survives_noise_that_underflows():
    made = router(NoisyTopKRouter).train()
    with torch.no_grad():
        made.noise.weight.fill_(-1e3)
    x, mask = hidden()
    made(x.abs(), mask).losses["router_load_loss"].backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in made.parameters())


def layer_record(**routings):
    """Of a layer some of whose sub-layers have routers."""
    empty = {"attention": (), "cross_attention": (), "feed_forward": ()}
    return LayerRecord(**{name: Record(routings=tuple(r)) for name, r in (empty | routings).items()})


@pytest.mark.parametrize("most", [1, 500, 2**20])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", [TopKRouter, NoisyTopKRouter])
def test_layers_that_are_measured_at_once_are_as_by_themselves(kind, masked, most, monkeypatch):
    """Some of them with several routers, whose losses are averaged, and whose experts stand in a row."""
    monkeypatch.setattr("hf_moa.modeling.routing.totals._MOST_AT_ONCE", most)
    x, mask = hidden()
    routers = [router(kind).train() for _ in range(7)]
    routings = [each(x, mask if masked else None) for each in routers]
    ends = [(0, 1), (1, 3), (3, 4), (4, 6), (6, 7)]
    names = ("attention", "feed_forward", "attention", "feed_forward", "cross_attention")
    layers = zip(names, range(5), strict=True)
    records = [layer_record(**{name: routings[slice(*ends[i])]}) for name, i in layers]
    terms, loads = router_terms([*records, layer_record()])
    inputs = [x, *(parameter for each in routers for parameter in each.parameters())]
    shares = [1, 0.5, 0.5, 1, 0.5, 0.5, 1]
    assert set(terms) == set(routings[0].losses)
    for name, term in terms.items():
        expected = sum(s * each.losses[name] for s, each in zip(shares, routings, strict=True))
        assert_same_with_gradients(term, expected, inputs)
    a, b, c, d, e, f, g = (each.load for each in routings)
    expected = {
        "attention": torch.stack([a, d]),
        "feed_forward": torch.stack([torch.cat([b, c]), torch.cat([e, f])]) / 2,
        "cross_attention": g.unsqueeze(0),
    }
    assert loads.keys() == expected.keys()
    for part, load in loads.items():
        torch.testing.assert_close(load, expected[part])


def test_processes_sum_alike_whatever_their_batches(monkeypatch):
    """One with longer rows measures fewer layers at once: each must take part in the same sums."""
    monkeypatch.setattr("hf_moa.modeling.routing.totals._MOST_AT_ONCE", 500)
    summed = []

    def with_a_process_of_the_same(counts):
        summed.append(counts.shape)
        return counts + torch.tensor([1.0, 0, 0, 0, 0, 7])

    for module in ("routing.totals", "routing.routers"):
        monkeypatch.setattr(f"hf_moa.modeling.{module}.sum_over_processes", with_a_process_of_the_same)
    shapes = []
    for length in (2, 50):
        x = torch.randn(3, length, 32, dtype=torch.float64)
        routers = [router().train() for _ in range(4)]
        for each in routers:
            each.balances_globally = True
        routings = [each(x) for each in routers]
        records = [layer_record(feed_forward=part) for part in (routings[:2], routings[2:])]
        terms, loads = router_terms(records)
        shapes.append(list(summed))
        expected = sum(each.losses["router_balance_loss"] for each in routings) / 2
        torch.testing.assert_close(terms["router_balance_loss"], expected)
        torch.testing.assert_close(
            loads["feed_forward"], torch.cat([each.load for each in routings]).view(2, -1) / 2
        )
        summed.clear()
    assert shapes == [[(4, 6)], [(4, 6)]]


def test_terms_are_on_the_device_of_the_last_layer():
    devices = ["meta", "cpu", "meta"]
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    routings = [router().to(device)(x.to(device)) for device in devices]
    terms, loads = router_terms([layer_record(attention=[each]) for each in routings])
    assert {x.device.type for x in [*terms.values(), *loads.values()]} == {"meta"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_fsdp_casts_is_measured_in_float32(dtype):
    x, mask = hidden()
    routing = router(NoisyTopKRouter).train()(x, mask)
    weight, logits, *noise = (
        each.to(dtype).detach() for each in (routing.weight, routing.logits, *routing.noise)
    )
    cast = routing._replace(weight=weight, logits=logits, noise=Noise(*noise))
    again = routing._replace(
        weight=weight.float(), logits=logits.float(), noise=Noise(*(each.float() for each in noise))
    )
    assert cast.counts().dtype == torch.float32
    for name, loss in again.losses.items():
        assert torch.equal(cast.losses[name], loss), name
        assert loss.isfinite()
    assert torch.equal(cast.load, again.load)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_routes_in_float32(dtype):
    made = router().to(dtype)
    x, mask = hidden()
    routing = made(x.to(dtype), mask)
    assert routing.weight.dtype == routing.logits.dtype == torch.float32
