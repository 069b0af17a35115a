"""The sparse MoE feed-forward layer (Shazeer et al. 2017, eq. 1) against a loop."""

import pytest
import torch
from common import assert_same_with_gradients, hidden, randomize, tiny_config
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from hf_moa.modeling.moe.feed_forward import SparseMoeFeedForward


def moe_layer(implementation="eager", *, experts=4, selected=2, router="topk", size=48):
    config = tiny_config(experts_implementation=implementation)
    return randomize(
        SparseMoeFeedForward(
            config,
            hidden_size=32,
            intermediate_size=size,
            activation="gelu",
            num_experts=experts,
            num_selected=selected,
            router_type=router,
        ).double()
    )


def naive(layer, x):
    router, experts = layer.router, layer.experts
    output = torch.zeros_like(x)
    for b, t in torch.cartesian_prod(*map(torch.arange, x.shape[:2])).tolist():
        logits = router.gate.weight @ x[b, t]
        kept = logits.argsort(descending=True)[: router.num_selected]
        gates = torch.exp(logits[kept]) / torch.exp(logits[kept]).sum()
        for g, e in zip(gates, kept, strict=True):
            h = torch.nn.functional.gelu(experts.up_proj[e] @ x[b, t] + experts.up_proj_bias[e])
            output[b, t] = output[b, t] + g * (experts.down_proj[e] @ h + experts.down_proj_bias[e])
    return output


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize(("experts", "selected"), [(4, 1), (4, 2), (7, 3), (3, 3)])
def test_equals_the_loop(experts, selected, implementation):
    layer = moe_layer(implementation, experts=experts, selected=selected)
    x, mask = hidden()
    actual, _ = layer(x, mask)
    assert_same_with_gradients(actual, naive(layer, x), [x, *layer.parameters()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [48, 50], ids=["aligned", "unaligned"])
def test_grouped_mm_agrees_with_the_loop_in_every_dtype(size, dtype):
    grouped = moe_layer("grouped_mm", size=size).to(dtype)
    loop = moe_layer("eager", size=size).to(dtype)
    loop.load_state_dict(grouped.state_dict())
    x, mask = hidden()
    actual, expected = grouped(x.to(dtype), mask)[0], loop(x.to(dtype), mask)[0]
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 0.3}[dtype]
    assert expected.abs().max() > 10 * tolerance
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_gradients_of_biases_are_rounded_once(implementation):
    """A token's share of them is small beside the sum, and would be lost in half precision."""
    torch.manual_seed(0)
    layer = moe_layer(implementation, experts=2, selected=1).bfloat16()
    x = torch.randn(1, 4096, 32, dtype=torch.bfloat16)
    layer(x)[0].backward(torch.full_like(x, 2**-8))
    # of the last bias, each token adds as much
    chosen = layer.router(x).index.flatten().bincount(minlength=2).double() * 2**-8
    gradient = layer.experts.down_proj_bias.grad
    assert torch.equal(gradient, chosen.unsqueeze(-1).expand(2, 32).bfloat16())


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_of_biases_are_computed_in_their_own_dtype(compiled):
    """Under autocast, whose scaled loss leaves half precision; compiled, backward is traced under it."""
    torch._dynamo.reset()
    layer, (x, _) = moe_layer("grouped_mm").float(), hidden()
    biases = [layer.experts.up_proj_bias, layer.experts.down_proj_bias]

    def gradients(step, *, scale, autocasts):
        with torch.autocast("cpu", torch.float16, enabled=autocasts):
            y = step(x.float())[0]
        return torch.autograd.grad(y.float().sum() * scale, biases)

    step = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    found = gradients(step, scale=2.0**16, autocasts=True)
    expected = gradients(layer, scale=1.0, autocasts=False)
    for actual, exact in zip(found, expected, strict=True):
        limit = 1e-2 * exact.abs().max().item()
        torch.testing.assert_close(actual / 2.0**16, exact, rtol=0, atol=limit)


class OutputAlone(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0]


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_traced_layer_can_be_saved(implementation, tmp_path):
    layer = OutputAlone(moe_layer(implementation)).float().eval()
    x = hidden()[0].float().detach()
    torch.jit.save(torch.jit.trace(layer, x), tmp_path / "layer.pt")
    torch.testing.assert_close(torch.jit.load(tmp_path / "layer.pt")(x), layer(x))


def test_another_implementation_sees_the_experts_themselves(monkeypatch):
    seen = []

    def implementation(experts, x, index, weights):
        seen.append(experts)
        return x

    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "of a test", implementation)
    layer = moe_layer("of a test")
    layer(hidden()[0])
    assert seen == [layer.experts]


def test_noisy_router_reports_the_load_loss():
    layer = moe_layer(router="noisy_topk").train()
    x, mask = hidden()
    losses = layer(x, mask)[1].routings[0].losses
    assert set(losses) == {
        "router_balance_loss",
        "router_z_loss",
        "router_importance_loss",
        "router_load_loss",
    }
