"""The cache of keys that are not skipped: smaller, and to attention as if all were there."""

import copy
import math

import pytest
import torch
from families import CASE
from transformers import DynamicCache, EncoderDecoderCache

from hf_moa.modeling.cache.gate_states import GatedDynamicLayer, GatedStaticLayer
from hf_moa.modeling.cct.compact_cache import CompactLayer
from hf_moa.modeling.cct.skipped_keys import (
    KeptKeys,
    attend_to_kept_keys,
    gathering_scores_pays,
    scores_to_add,
    visible_keys,
)
from hf_moa.modeling.cct.token_subset import TokenSubset

GPT2, T5 = CASE["GPT2LMHeadModel"], CASE["T5ForConditionalGeneration"]
MIXTURES = pytest.mark.parametrize("attention_type", ["mha", "mae", "moa"])


def build(execution="sparse", case=GPT2, **fields):
    fields = {"cct_budgets": [1, 0.5], "attention_type": "mae"} | fields
    return case.build(cct_execution=execution, **fields).double()


def small_layers_skip(monkeypatch):
    """As large ones do under `auto`."""
    for name in ("execution._TO_FIND", "execution._TO_GATHER", "compact_cache._LEAST_NUMBERS"):
        monkeypatch.setattr(f"hf_moa.modeling.cct.{name}", 0)


def tokens(length=12, batch_size=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, 60, (batch_size, length), generator=generator)


@torch.no_grad()
def decode(model, ids, steps, mask=None, cache=None):
    """Logits of `ids` given in pieces of `steps` tokens, and the cache."""
    logits, start, cache = [], 0, DynamicCache() if cache is None else cache
    past = cache.get_seq_length()
    for step in steps:
        piece = ids[:, start : start + step]
        kwargs = {}
        if mask is not None:
            kwargs["attention_mask"] = mask[:, : past + start + step]
            position = (mask.cumsum(-1) - 1).clamp(min=0)
            kwargs["position_ids"] = position[:, past + start : past + start + step]
        logits.append(model(piece, past_key_values=cache, use_cache=True, **kwargs).logits)
        start += step
    return torch.cat(logits, dim=1), cache


def naive(query, key, value, open_keys, scores, scaling):
    """`[B, h, T, dh]`, `[B, h, S, dh]` with skipped keys as zeros, `scores` `[B, h, T, S]`."""
    key, value = (x * open_keys[:, None, :, None] for x in (key, value))
    return (query @ key.transpose(2, 3) * scaling + scores).softmax(dim=-1) @ value


@pytest.mark.parametrize("per_sequence", [False, True])
@pytest.mark.parametrize("mask", ["none", "bool", "added"])
def test_attention_equals_that_to_all_keys(mask, per_sequence):
    torch.manual_seed(0)
    sizes = {"dtype": torch.float64, "requires_grad": True}
    query, (key, value) = torch.randn(2, 3, 4, 5, **sizes), torch.randn(2, 2, 3, 7, 5, **sizes)
    bias = torch.randn(2 if per_sequence else 1, 3, 4, 7, **sizes)
    open_queries, open_keys = torch.rand(2, 4) < 0.6, torch.rand(2, 7) < 0.6
    seen = torch.rand(2, 1, 4, 7) < 0.8
    seen[..., 0] = True
    given = {"none": None, "bool": seen, "added": seen.double().log()}[mask]
    scores = scores_to_add(given, bias, causal=True, like=query.new_empty(1, 1, 4, 7))
    if mask == "none":  # the last 4 of 7
        seen = torch.ones(4, 7, dtype=torch.bool).tril(3)
    full = bias.masked_fill(~seen, -math.inf)
    expected = naive(query, key, value, open_keys.double(), full.expand(2, -1, -1, -1), 0.4)
    expected = expected.transpose(1, 2)[open_queries]

    query_rows, key_rows = TokenSubset(open_queries), TokenSubset(open_keys)
    context = attend_to_kept_keys(
        query_rows.gather(query.transpose(1, 2)),
        KeptKeys.of(key_rows, *(key_rows.gather(x.transpose(1, 2)) for x in (key, value))),
        queries=query_rows,
        visible=None,
        scores=scores,
        causal=False,
        scaling=0.4,
    )
    torch.testing.assert_close(context.squeeze(0), expected)
    inputs, weights = (query, key, value, bias), torch.randn_like(expected)
    for actual, wanted in zip(
        torch.autograd.grad((context.squeeze(0) * weights).sum(), inputs),
        torch.autograd.grad((expected * weights).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(actual, wanted)


def test_a_query_that_sees_nothing_gets_nothing():
    rows = TokenSubset(torch.ones(1, 2, dtype=torch.bool))
    x = torch.randn(1, 2, 1, 4)
    mask = torch.tensor([[[[True, True], [False, False]]]])
    for scores, visible in (
        (scores_to_add(mask, None, causal=False, like=x.new_empty(1, 1, 2, 2)), None),
        (None, torch.zeros(1, 2, dtype=torch.bool)),
    ):
        context = attend_to_kept_keys(
            x,
            KeptKeys.of(rows, x, x),
            queries=rows,
            visible=visible,
            scores=scores,
            causal=False,
            scaling=1.0,
        )
        assert not context[0, 1].any()


@MIXTURES
@pytest.mark.parametrize("steps", [[12], [1] * 12, [5, 1, 1, 3, 2], [1, 11]], ids=str)
@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_decoding_equals_the_dense_forward(attention_type, steps, padding, batch_size):
    ids, mask = tokens(batch_size=batch_size), None
    if padding:
        mask = torch.ones_like(ids)
        mask[batch_size // 2, :3] = 0
        mask[batch_size - 1, :7] = 0
    expected, _ = decode(build("dense", attention_type=attention_type), ids, [12], mask)
    actual, cache = decode(build(attention_type=attention_type), ids, steps, mask)
    real = ... if mask is None else mask.bool()
    torch.testing.assert_close(actual[real], expected[real], atol=1e-9, rtol=1e-9)
    for layer in cache.layers:
        assert isinstance(layer, CompactLayer)
        assert layer.get_seq_length() == layer.length == 12


def test_holds_the_open_tokens_and_no_others():
    model, ids = build(), tokens()
    gates = model(ids, output_cct_gates=True).cct_gates
    _, cache = decode(model, ids, [4, 1, 1, 6])
    for layer, gate in zip(cache.layers, gates, strict=True):
        counts = gate["kv"].sum(dim=1).long()
        assert 0 < counts.sum() < ids.numel()
        assert layer.keys.shape[2] == layer.values.shape[2] == 1 + int(counts.max())
        for b, positions in enumerate(layer.positions):
            assert positions[positions >= 0].tolist() == gate["kv"][b].nonzero().flatten().tolist()
        assert not layer.keys[:, :, 0].any()


@pytest.mark.parametrize("batch_size", [1, 3])
def test_keys_grow_in_place_and_what_was_handed_out_stays(batch_size):
    model, ids = build(), tokens(batch_size=batch_size)
    _, cache = decode(model, ids, [6, 1])
    held = [(layer.keys.data_ptr(), layer.kept_keys) for layer in cache.layers]
    copies = copy.deepcopy([keys for _, keys in held])
    decode(model, ids[:, 7:], [1, 1, 1, 1, 1], cache=cache)
    assert any(
        layer.keys.shape != keys.key.shape for layer, keys in zip(cache.layers, copies, strict=True)
    )
    for layer, (address, keys), before in zip(cache.layers, held, copies, strict=True):
        assert layer.keys.data_ptr() == address
        assert torch.equal(keys.position, before.position)
        for now, then in ((keys.key, before.key), (keys.value, before.value)):
            is_key = keys.is_key[:, None, :, None]
            assert torch.equal(now * is_key, then * is_key)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_steps_have_the_gradients_of_the_whole(batch_size):
    ids, gradients = tokens(batch_size=batch_size), []
    for execution, steps in (("dense", [12]), ("sparse", [5, 1, 1, 3, 2])):
        model = build(execution)
        logits, _ = decode.__wrapped__(model, ids, steps)
        logits.square().sum().backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    for name, gradient in gradients[1].items():
        torch.testing.assert_close(gradient, gradients[0][name], atol=1e-8, rtol=1e-8, msg=name)


@pytest.mark.parametrize("execution", ["sparse", "auto"])
def test_generation_starts_small_and_stays_so(execution, monkeypatch):
    """Whatever the gates of the first token are: it does not tell of the rest."""
    small_layers_skip(monkeypatch)
    model = build(execution, case=T5)
    cache = model.generate(
        tokens(7), max_new_tokens=6, eos_token_id=None, return_dict_in_generate=True
    ).past_key_values
    for layer in [*cache.self_attention_cache.layers, *cache.cross_attention_cache.layers]:
        assert isinstance(layer, CompactLayer)
    assert cache.cross_attention_cache.layers[0].length == 7


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_all_skipped_and_none(value):
    dense, sparse, ids = build("dense"), build(), tokens()
    for model in (dense, sparse):
        model.set_cct_gates(value)
    expected, _ = decode(dense, ids, [12])
    actual, cache = decode(sparse, ids, [4, 1, 1, 6])
    torch.testing.assert_close(actual, expected, atol=1e-9, rtol=1e-9)
    assert (cache.layers[0].positions >= 0).sum() == value * ids.numel()


@pytest.mark.covering(pairs=True)
@MIXTURES
@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("projected", ["all", "open"])
@pytest.mark.parametrize("case", [GPT2, T5], ids=["gpt2", "t5"])
def test_auto_equals_dense_once_the_cache_is_large(
    case, projected, padding, attention_type, monkeypatch
):
    """Steps behind open keys, all tokens projected or only the open ones."""
    small_layers_skip(monkeypatch)
    monkeypatch.setattr("hf_moa.modeling.cct.compact_cache.LARGEST_SHARE", 1)
    if projected == "all":
        monkeypatch.setattr("hf_moa.modeling.cct.execution._TO_FIND", 10**12)
    found, caches = [], []
    for execution in ("dense", "auto"):
        model = build(execution, case=case, attention_type=attention_type)
        mask = torch.ones(3, 20, dtype=torch.long)
        if padding:
            mask[1, :7] = mask[2, :3] = 0
        if case is T5:
            cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
            kwargs = {"input_ids": tokens(20), "attention_mask": mask, "past_key_values": cache}
            ids = tokens(24, seed=1)
            steps = [model(decoder_input_ids=ids[:, i : i + 1], **kwargs).logits for i in range(24)]
            found.append(torch.cat(steps, dim=1))
            caches.append(cache.self_attention_cache.layers + cache.cross_attention_cache.layers)
        else:
            mask = torch.nn.functional.pad(mask, (0, 4), value=1)
            logits, cache = decode.__wrapped__(model, tokens(24), [4] + [1] * 20, mask)
            found.append(logits[mask.bool()])
            caches.append(cache.layers)
        size = caches[0][0].keys.shape[1] * caches[0][0].keys.shape[3]
        monkeypatch.setattr("hf_moa.modeling.cct.compact_cache._LEAST_NUMBERS", 3 * 12 * size)
    torch.testing.assert_close(found[1], found[0], atol=1e-9, rtol=1e-9)
    assert all(type(layer) is GatedDynamicLayer for layer in caches[0])
    assert all(isinstance(layer, CompactLayer) for layer in caches[1])


def test_a_cache_that_is_opened_drops_the_skipped_keys_and_keeps_padding():
    model, mask = build("dense", attention_type="mha"), torch.ones(3, 12, dtype=torch.long)
    mask[1, :5] = 0
    _, cache = decode(model, tokens(), [12], mask)
    outputs = model(tokens(), attention_mask=mask, output_cct_gates=True)
    gates = [gate["kv"] > 0 for gate in outputs.cct_gates]
    for layer, gate in zip(cache.layers, gates, strict=True):
        opened = CompactLayer.in_place_of(layer)
        kept = gate | (mask == 0)
        for b, positions in enumerate(opened.positions):
            assert positions[positions >= 0].tolist() == kept[b].nonzero().flatten().tolist()
        assert torch.equal(opened.spread().keys, layer.keys * kept[:, None, :, None])
        assert opened.get_seq_length() == 12
    assert any((~gate & (mask == 1)).any() for gate in gates)


def test_empty_slots_are_closed_up():
    """A step's tokens take one slot in all sequences; what is not one's own goes."""
    generator, layer = torch.Generator().manual_seed(0), CompactLayer.in_place_of(GatedDynamicLayer())
    is_open = torch.rand(4, 300, generator=generator) < torch.tensor([0.1, 0.2, 0.3, 0.5]).unsqueeze(1)
    states = torch.randn(4, 300, 2, 3, generator=generator)
    for i in range(300):
        rows = TokenSubset(is_open[:, i : i + 1])
        state = rows.gather(states[:, i : i + 1])
        layer.update(state, -state, subset=rows)
    most = int(is_open.sum(dim=1).max())
    assert most < layer.keys.shape[2] <= 1 + most + max(8, most // 6)
    expected = (states * is_open[:, :, None, None]).transpose(1, 2)
    full = layer.spread()
    assert torch.equal(full.keys, expected)
    assert torch.equal(full.values, -expected)


@MIXTURES
def test_can_be_reordered_cropped_repeated_selected_and_reset(attention_type):
    model, ids = build(attention_type=attention_type), tokens()
    dense = build("dense", attention_type=attention_type)
    order = torch.tensor([2, 0, 0, 1])

    def go_on(cache, past, ids):
        """Two more tokens, against the whole sequences."""
        new = tokens(2, len(past), seed=5)
        actual, cache = decode(model, new, [1, 1], cache=cache)
        expected, _ = decode(dense, torch.cat([past, new], dim=1), [past.shape[1] + 2])
        torch.testing.assert_close(actual, expected[:, -2:], atol=1e-9, rtol=1e-9)

    _, cache = decode(model, ids, [8, 1, 3])
    copied = copy.deepcopy(cache)
    copied.reorder_cache(order)
    go_on(copied, ids[order], ids)
    for remove in (1, 5, 11):
        copied = copy.deepcopy(cache)
        copied.crop(-remove)
        assert copied.get_seq_length() == 12 - remove
        go_on(copied, ids[:, :-remove], ids)
    copied = copy.deepcopy(cache)
    copied.batch_repeat_interleave(2)
    go_on(copied, ids.repeat_interleave(2, dim=0), ids)
    copied = copy.deepcopy(cache)
    copied.batch_select_indices(order[:2])
    go_on(copied, ids[order[:2]], ids)
    for row in range(len(ids)):
        copied, one = copy.deepcopy(cache), ids[row : row + 1]
        copied.batch_select_indices(torch.tensor([row]))
        go_on(copied, one, ids)
        copied.crop(-3)  # what was new, and one more
        go_on(copied, one[:, :-1], ids)
    cache.reset()
    assert cache.get_seq_length() == 0
    actual, _ = decode(model, ids, [12], cache=cache)
    torch.testing.assert_close(actual, decode(dense, ids, [12])[0], atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_one_sequence_whose_first_key_is_skipped_can_be_cropped(seed):
    logits = []
    ids = tokens(batch_size=1, seed=seed)
    for execution in ("dense", "sparse"):
        model = build(execution)
        model.set_cct_gates(0)
        first, cache = decode(model, ids, [1])
        model.set_cct_gates(None)
        next_ones, _ = decode(model, ids[:, 1:], [1] * 8, cache=cache)
        cache.crop(-4)
        last, _ = decode(model, ids[:, 5:], [1] * 7, cache=cache)
        logits.append(torch.cat([first, next_ones, last], dim=1))
    assert sum(int((layer.positions >= 0).sum()) for layer in cache.layers) > 2
    torch.testing.assert_close(logits[1], logits[0], atol=1e-9, rtol=1e-9)


def test_positive_crop_is_refused():
    _, cache = decode(build(), tokens(), [12])
    with pytest.raises(ValueError, match="positive value"):
        cache.crop(3)
    assert cache.get_seq_length() == 12


@pytest.mark.parametrize("change", ["eager", "dense", "train"])
def test_is_spread_for_attention_that_needs_all_keys(change):
    model, ids = build(), tokens()
    expected, _ = decode(build("dense"), ids, [12])
    first, cache = decode(model, ids, [9])
    if change == "eager":
        model.set_attn_implementation("eager")
    elif change == "dense":
        model.set_cct_execution("dense")
    else:  # a layer that cannot skip
        model.transformer.h[0].attn.cct.control.train()
        model.transformer.h[0].attn.cct.control.noise_scale.zero_()
        reference = build("dense")
        reference.transformer.h[0].attn.cct.control.train()
        reference.transformer.h[0].attn.cct.control.noise_scale.zero_()
        _, dense_cache = decode(build("dense"), ids, [9])
        soft, _ = decode(reference, ids[:, 9:], [1, 2], cache=dense_cache)
        expected = torch.cat([expected[:, :9], soft], dim=1)
    second, cache = decode(model, ids[:, 9:], [1, 2], cache=cache)
    layer = cache.layers[0]
    assert type(layer) is GatedDynamicLayer
    assert layer.keys.shape[2] == 12
    actual = torch.cat([first, second], dim=1)
    torch.testing.assert_close(actual, expected, atol=1e-9, rtol=1e-9)


def test_static_caches_hold_all_keys():
    model = build()
    kwargs = {"max_new_tokens": 5, "eos_token_id": None, "pad_token_id": 0}
    outputs = [
        model.generate(
            tokens(), cache_implementation=c, output_logits=True, return_dict_in_generate=True, **kwargs
        )
        for c in ("dynamic", "static")
    ]
    for logits in zip(*(output.logits for output in outputs), strict=True):
        torch.testing.assert_close(*logits, atol=1e-9, rtol=1e-9)
    assert isinstance(outputs[0].past_key_values.layers[0], CompactLayer)
    assert isinstance(outputs[1].past_key_values.layers[0], GatedStaticLayer)


def test_gradients_go_through_the_cache():
    ids, gradients = tokens(), []
    for execution in ("dense", "sparse"):
        model, cache = build(execution), DynamicCache()
        model(ids[:, :8], past_key_values=cache)
        model(ids[:, 8:], past_key_values=cache).logits.square().sum().backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    dense, sparse = gradients
    for name in dense | sparse:
        zeros = torch.zeros_like((dense | sparse)[name])
        actual, expected = sparse.get(name, zeros), dense.get(name, zeros)
        torch.testing.assert_close(actual, expected, atol=1e-8, rtol=1e-8, msg=name)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_skipped_keys_keep_their_weight_beside_a_large_bias(mode):
    """An open key with a large bias and a low product does not hide them."""
    for size in (20.0, 110.0, 760.0):
        query, key = torch.tensor([[[[1.0]]]]).double(), torch.tensor([[[[-size - 1]]]]).double()
        rows = TokenSubset(torch.tensor([[True, False]]))
        with mode():
            context = attend_to_kept_keys(
                query,
                KeptKeys.of(rows, key, torch.ones_like(key)),
                queries=TokenSubset(torch.tensor([[True]])),
                visible=None,
                scores=torch.tensor([[[[size, 0.0]]]]).double(),
                causal=False,
                scaling=1.0,
            )
        torch.testing.assert_close(context.item(), torch.tensor(-1.0).sigmoid().item())


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("open_share", [0.0, 0.5, 1.0])
def test_a_step_without_a_graph_has_the_same_bias(heads, open_share):
    """Sequences without skipped keys, without open ones, and keys that the scores hide."""
    torch.manual_seed(0)
    is_open = torch.rand(4, 9) < open_share
    is_open[0], is_open[1] = True, False
    rows = TokenSubset(is_open)
    key, value = torch.randn(2, 4, 9, 3, 5).double()
    keys = KeptKeys.of(rows, rows.gather(key), rows.gather(value))
    bias = torch.randn(1, heads, 1, 9).double()
    bias[..., 4] = -math.inf
    for scores in (bias, torch.full_like(bias, -math.inf)):
        contexts = []
        for mode in (torch.enable_grad, torch.no_grad):
            with mode():
                context = attend_to_kept_keys(
                    torch.ones(1, 4, 3, 5).double(),
                    keys,
                    queries=TokenSubset(torch.ones(4, 1, dtype=torch.bool)),
                    visible=None,
                    scores=scores,
                    causal=False,
                    scaling=0.4,
                )
            contexts.append(context)
        torch.testing.assert_close(*contexts, atol=1e-12, rtol=1e-12)
        assert contexts[0].isfinite().all()
    assert not contexts[0].any()


def test_cache_of_autocast_goes_on_outside():
    ids, logits = tokens(), []
    for execution in ("dense", "sparse"):
        model, cache = GPT2.build(cct_execution=execution, cct_budgets=[1, 0.5]), DynamicCache()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            model(ids[:, :6], past_key_values=cache)
        with torch.no_grad():
            logits.append(model(ids[:, 6:], past_key_values=cache).logits)
        assert logits[-1].dtype == torch.float32
    # gates may decide otherwise where bfloat16 rounds: most of the logits tell
    assert (logits[0] - logits[1]).abs().median() < 0.05


@pytest.mark.parametrize("batch_size", [1, 3])
def test_gradients_of_a_step_without_keys_outlast_the_next_step(batch_size):
    model, ids, cache = build(attention_type="mha"), tokens(batch_size=batch_size), DynamicCache()

    def only_queries(network, x):
        gates = x.new_ones(*x.shape[:-1], network.num_gates)
        gates[..., 0] = network.num_gates != 2
        return gates

    decode(model, ids[:, :4], [3, 1], cache=cache)
    model.set_cct_gates(only_queries)
    logits = model(ids[:, 4:5], past_key_values=cache).logits
    model.set_cct_gates(None)
    decode(model, ids[:, 5:], [1, 1], cache=cache)
    logits.sum().backward()
    assert model.transformer.wte.weight.grad.any()


def test_holds_little_room():
    model, ids = build(n_positions=400), tokens(300)
    _, cache = decode(model, ids, [290, *[1] * 10])
    for layer in cache.layers:
        keys = layer.keys
        assert keys.untyped_storage().nbytes() <= keys.nbytes * 9 / 8 + 1
        assert layer.kept_keys.is_key.sum(dim=1).max() < 300


@pytest.mark.parametrize("closed", [False, True])
def test_inference_caches_take_gradients_outside(closed):
    model, ids, cache = build(), tokens(), DynamicCache()
    with torch.inference_mode():
        model(ids[:, :5], past_key_values=cache)
    if closed:  # nothing is appended
        model.set_cct_gates(0)
    model(ids[:, 5:6], past_key_values=cache).logits.sum().backward()
    assert model.transformer.wte.weight.grad.any()


def test_half_precision_is_as_exact_as_to_all_keys():
    torch.manual_seed(0)
    size, heads, width = 1000, 4, 64
    query, key, value = (torch.randn(2, size, heads, width) for _ in range(3))
    value[:, :, :, :8] += 1  # something to average
    open_keys = torch.rand(2, size) < 0.1
    last = torch.zeros(2, size, dtype=torch.bool)
    last[:, -1] = True
    exact = naive(
        *(x.double().transpose(1, 2) for x in (query[:, -1:], key, value)),
        open_keys.double(),
        torch.zeros(1, dtype=torch.float64),
        0.125,
    )
    key, value = (x * open_keys[:, :, None, None] for x in (key, value))
    half = [x.bfloat16() for x in (query, key, value)]
    dense = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (half[0][:, -1:], half[1], half[2])), scale=0.125
    )
    rows = TokenSubset(open_keys)
    sparse = attend_to_kept_keys(
        half[0][:, -1:].reshape(1, 2, heads, width),
        KeptKeys.of(rows, *(rows.gather(x) for x in half[1:])),
        queries=TokenSubset(torch.ones(2, 1, dtype=torch.bool)),
        visible=None,
        scores=None,
        causal=False,
        scaling=0.125,
    )
    dense_error = (dense.double() - exact).norm()
    sparse_error = (sparse.double().squeeze(0) - exact.squeeze(2)).norm()
    assert sparse_error < 1.5 * dense_error


def test_crop_of_more_than_there_is_leaves_nothing():
    _, cache = decode(build(attention_type="mha"), tokens(), [12])
    cache.crop(-20)
    assert cache.get_seq_length() == 0


def test_visible_keys_of_chunks_are_told_by_their_masks():
    found = visible_keys(None, None, num_queries=2, num_keys=5, causal=True)
    assert found == (False, None)


@pytest.mark.parametrize("pays", [True, False])
def test_position_bias_either_way(pays, monkeypatch):
    monkeypatch.setattr(
        "hf_moa.modeling.cct.sparse_attention.gathering_scores_pays", lambda *_, **__: pays
    )
    small_layers_skip(monkeypatch)
    attended = []
    monkeypatch.setattr(
        "hf_moa.modeling.cct.sparse_attention.attend_to_kept_keys",
        lambda *args, **kwargs: attended.append(1) or attend_to_kept_keys(*args, **kwargs),
    )
    ids = tokens(9)
    expected = build("dense", CASE["T5EncoderModel"])(ids).last_hidden_state
    assert not attended
    actual = build("auto", CASE["T5EncoderModel"])(ids).last_hidden_state
    torch.testing.assert_close(actual, expected, atol=1e-9, rtol=1e-9)
    assert bool(attended) == pays


def test_gathering_scores_pays_where_little_is_open():
    def rows(share):
        return TokenSubset(torch.arange(100).view(1, 100) < 100 * share)

    assert gathering_scores_pays(rows(0.3), rows(0.3), masked=False)
    assert not gathering_scores_pays(rows(0.5), rows(0.5), masked=False)
    assert gathering_scores_pays(rows(0.5), rows(0.5), masked=True)
    assert not gathering_scores_pays(rows(0.9), rows(0.9), masked=True)
