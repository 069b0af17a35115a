"""`GatedAttention` by itself: grouped queries, rotations and windows, each against its equation."""

import itertools

import pytest
import torch
from common import assert_same_with_gradients, hidden, randomize
from references import control, mae_gate
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from hf_moa.modeling.attention.layer import GatedAttention
from hf_moa.modeling.attention.multi_head import MultiHead
from hf_moa.modeling.cct.attention import AttentionGates
from hf_moa.modeling.mae.mixture import MixtureOfHeads
from hf_moa.modeling.moa.mixture import MixtureOfAttentionExperts

D, HEADS, DH = 32, 4, 8

FORMS = {
    "plain": {},
    "grouped": {"num_kv_heads": 2},
    "shared": {"num_kv_heads": 1},
    "rotated": {"rotate": apply_rotary_pos_emb, "is_causal": True},
    "window": {"window": 3, "is_causal": True},
    "all": {"num_kv_heads": 2, "rotate": apply_rotary_pos_emb, "window": 3, "is_causal": True},
}
each_form = pytest.mark.parametrize("form", FORMS)
each_implementation = pytest.mark.parametrize("implementation", ["sdpa", "eager"])


def mixture(kind, is_causal=False):
    if kind == "mae":
        return MixtureOfHeads(
            hidden_size=D, num_heads=HEADS, head_dim=DH, gate_dropout=0.0, is_causal=is_causal, window=2
        )
    if kind == "moa":
        return MixtureOfAttentionExperts(hidden_size=D, num_experts=6, num_selected=HEADS, head_dim=DH)
    return MultiHead(num_heads=HEADS, head_dim=DH)


def gates(num_kv_heads=HEADS, *, is_causal=False, execution="auto"):
    return AttentionGates(
        hidden_size=D,
        gate_hidden_size=16,
        num_heads=HEADS,
        num_kv_heads=num_kv_heads,
        head_dim=DH,
        is_causal=is_causal,
        starts_open=False,
        execution=execution,
    )


def build(kind="mha", **options):
    heads = mixture(kind, options.get("is_causal", False))
    return randomize(GatedAttention(D, mixture=heads, **options).double())


def angles(length):
    """Of rotary embeddings, `[T, dh / 2]`."""
    frequencies = 10_000.0 ** (-torch.arange(0, DH, 2).double() / DH)
    return torch.arange(length).double()[:, None] * frequencies


def embeddings(length, batch_size=1):
    """Cosines and sines as transformers' models make them, `[B, T, dh]`."""
    doubled = torch.cat([angles(length)] * 2, dim=-1).expand(batch_size, -1, -1)
    return doubled.cos(), doubled.sin()


def call(layer, x, mask, **kwargs):
    if layer.rotate is not None:
        kwargs["position_embeddings"] = embeddings(x.shape[1], x.shape[0])
    return layer(x, padding_mask=mask, **kwargs)


# --- the equations ----------------------------------------------------------------------------------


def turned(x, position):
    """A vector `[dh]`, each pair of its numbers turned by an angle of its position."""
    first, second = x.chunk(2)
    angle = angles(position + 1)[position]
    return torch.cat(
        [first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()]
    )


def projected(x, linear):
    """`[T, d]` -> `[T, heads, dh]`."""
    return (x @ linear.weight.T + linear.bias).unflatten(-1, (-1, DH))


def sees(layer, mask, t, s):
    if not mask[s]:
        return False
    return not layer.is_causal or (s <= t and (layer.window is None or s > t - layer.window))


def attended(layer, q, k, v, mask, t, skipped=None):
    """The context of the query `[dh]` at t, of keys and values `[S, dh]`."""
    if layer.rotate is not None:
        q = turned(q, t)
        k = torch.stack([turned(each, s) for s, each in enumerate(k)])
    seen = [s for s in range(len(k)) if sees(layer, mask, t, s)]
    terms = {s: torch.exp(q @ k[s] * DH**-0.5) for s in seen}
    if skipped is not None:  # their keys and values are zero, and they count
        terms |= {s: torch.ones_like(terms[s]) for s in seen if skipped[s]}
        v = torch.where(skipped[:, None], 0.0, v)
    return sum(terms[s] * v[s] for s in seen) / sum(terms.values())


def heads_of(layer, x, mask, skipped=None):
    """The contexts of all heads, `[T, h, dh]`; a group of heads shares keys and values."""
    q, k, v = (projected(x, linear) for linear in (layer.q_proj, layer.k_proj, layer.v_proj))
    group = HEADS // k.shape[1]
    return torch.stack(
        [
            torch.stack(
                [
                    attended(layer, q[t, j], k[:, j // group], v[:, j // group], mask, t, skipped)
                    for j in range(HEADS)
                ]
            )
            if mask[t]
            else q.new_zeros(HEADS, DH)
            for t in range(len(x))
        ]
    )


def multi_head(layer, x, mask):
    contexts = torch.stack([heads_of(layer, *each) for each in zip(x, mask, strict=True)])
    return contexts.flatten(-2) @ layer.o_proj.weight.T + layer.o_proj.bias


def mixture_of_heads(layer, x, mask):
    """Z = sum_S g_S f_S(X), written out."""
    mix = layer.mixture
    found = mae_gate(x, mask, mix.gate, mix.is_causal, mix.window)
    blocks = layer.o_proj.weight.T.unflatten(0, (HEADS, DH))
    output = torch.zeros_like(x)
    for b in range(len(x)):
        heads = torch.einsum("thd,hde->the", heads_of(layer, x[b], mask[b]), blocks)
        for t in range(x.shape[1]):
            if not mask[b, t]:
                continue
            g = found[b, t] if mix.is_causal else found[b]
            for s, dropped in enumerate(itertools.combinations(range(HEADS), 1)):
                kept = sum(heads[t, j] for j in range(HEADS) if j not in dropped)
                output[b, t] = output[b, t] + g[s] * HEADS / (HEADS - 1) * kept
            output[b, t] = output[b, t] + layer.o_proj.bias
    return output


# --- plain heads and MAE, in full ---------------------------------------------------------------------


@each_implementation
@each_form
def test_multi_head_attention_equals_its_equation(form, implementation):
    layer = build(attn_implementation=implementation, **FORMS[form])
    x, mask = hidden()
    actual = call(layer, x, mask).hidden_states
    assert_same_with_gradients(actual[mask], multi_head(layer, x, mask)[mask], [x, *layer.parameters()])


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@each_form
def test_mae_equals_the_sum_over_experts(form, training):
    layer = build("mae", **FORMS[form]).train(training)
    x, mask = hidden()
    actual = call(layer, x, mask).hidden_states
    expected = mixture_of_heads(layer, x, mask)
    assert_same_with_gradients(actual[mask], expected[mask], [x, *layer.parameters()])


@pytest.mark.parametrize("kind", ["mha", "mae"])
@each_form
def test_decoding_token_by_token_equals_the_whole(form, kind):
    layer = build(kind, **FORMS[form] | {"is_causal": True}).eval()
    x, _ = hidden()
    whole = call(layer, x, None).hidden_states
    cache, steps = DynamicCache(), []
    for t in range(x.shape[1]):
        options = {}
        if layer.rotate is not None:
            options["position_embeddings"] = [e[:, t : t + 1] for e in embeddings(x.shape[1])]
        steps.append(layer(x[:, t : t + 1], cache=cache, **options).hidden_states)
    torch.testing.assert_close(torch.cat(steps, dim=1), whole, atol=1e-12, rtol=0)


# --- MoA and CCT, where it has a meaning -------------------------------------------------------------


@pytest.mark.parametrize("form", ["plain", "rotated", "window"])
def test_moa_equals_the_loop_over_tokens_and_experts(form):
    layer = build("moa", **FORMS[form])
    x, mask = hidden()
    actual = call(layer, x, mask).hidden_states
    router, output = layer.mixture.router, []
    for b in range(len(x)):
        k, v = (projected(x[b], linear)[:, 0] for linear in (layer.k_proj, layer.v_proj))
        for t in range(x.shape[1]):
            p = torch.softmax(router.gate.weight @ x[b, t], dim=0)
            chosen = sorted(range(len(p)), key=lambda i: -p[i].item())[:HEADS]
            y = layer.o_proj.bias
            for i in chosen if mask[b, t] else ():
                q = layer.q_proj.weight[i] @ x[b, t] + layer.q_proj.bias[i]
                weight = p[i] / sum(p[e] for e in chosen).detach()
                y = y + weight * attended(layer, q, k, v, mask[b], t) @ layer.o_proj.weight[i]
            output.append(y)
    expected = torch.stack(output).view(x.shape)
    assert_same_with_gradients(actual[mask], expected[mask], [x, *layer.parameters()])


@pytest.mark.parametrize("execution", ["dense", "sparse"])
@pytest.mark.parametrize("form", ["plain", "grouped", "shared", "rotated"])
def test_cct_equals_its_equation(form, execution):
    options = dict(FORMS[form])
    kv_heads, causal = options.get("num_kv_heads", HEADS), options.get("is_causal", False)
    layer = build(gates=gates(kv_heads, is_causal=causal, execution=execution), **options).eval()
    x, mask = hidden()
    output = []
    for b in range(len(x)):
        g = control(layer.gates.control, x[b])
        assert 0 < g[mask[b]].mean() < 1
        contexts = heads_of(layer, x[b], mask[b], g[:, 0] == 0) * g[:, 1, None, None]
        output.append(contexts.flatten(-2) @ layer.o_proj.weight.T + layer.o_proj.bias)
    actual = call(layer, x, mask).hidden_states
    assert_same_with_gradients(actual[mask], torch.stack(output)[mask], [x, *layer.parameters()])


@pytest.mark.parametrize("form", ["plain", "grouped", "rotated"])
def test_cct_decodes_on_a_compact_cache(form):
    options = FORMS[form] | {"is_causal": True}
    kv_heads = options.get("num_kv_heads", HEADS)
    layer = build(gates=gates(kv_heads, is_causal=True, execution="sparse"), **options).eval()
    x, _ = hidden()
    with torch.no_grad():
        whole = call(layer, x, None).hidden_states
        cache, steps = DynamicCache(), []
        for t in range(x.shape[1]):
            more = {}
            if layer.rotate is not None:
                more["position_embeddings"] = [e[:, t : t + 1] for e in embeddings(x.shape[1])]
            steps.append(layer(x[:, t : t + 1], cache=cache, **more).hidden_states)
    torch.testing.assert_close(torch.cat(steps, dim=1), whole, atol=1e-12, rtol=0)


# --- what is refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "one of num_heads and mixture"),
        ({"num_heads": 4, "mixture": mixture("mha")}, "one of num_heads and mixture"),
        ({"num_heads": 5}, "must divide hidden_size=32"),
        ({"num_heads": 4, "num_kv_heads": 3}, "num_kv_heads must divide"),
        ({"mixture": mixture("moa"), "num_kv_heads": 2}, "num_kv_heads must be 1"),
        ({"mixture": mixture("mha"), "head_dim": 16}, "head_dim is the mixture's"),
        ({"num_heads": 4, "window": 3}, "window must be None"),
        ({"num_heads": 4, "window": 0, "is_causal": True}, "window must be None"),
        ({"num_heads": 4, "window": 3, "is_causal": True, "gates": gates()}, "window must be None"),
        (
            {"num_heads": 4, "rotate": apply_rotary_pos_emb, "is_cross_attention": True},
            "rotate must be None in cross-attention",
        ),
    ],
    ids=range(10),
)
def test_what_does_not_go_together_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        GatedAttention(D, **options)


def test_layer_that_rotates_wants_positions():
    layer = build(**FORMS["rotated"])
    with pytest.raises(ValueError, match="position_embeddings must be given"):
        layer(hidden()[0])


def test_cross_attention_wants_what_it_looks_at():
    layer = GatedAttention(D, 4, is_cross_attention=True)
    with pytest.raises(ValueError, match="encoder_hidden_states must be given to cross-attention"):
        layer(hidden()[0])


def test_layer_of_one_line():
    x = torch.randn(2, 5, 64)
    y, attentions, record = GatedAttention(64, 8)(x)
    assert y.shape == x.shape
    assert attentions is None
    assert record.expert_weights is None
    heads = MixtureOfHeads(hidden_size=64, num_heads=8, head_dim=8)
    assert GatedAttention(64, mixture=heads)(x).record.expert_weights.shape == (2, 8)
