"""CCT's static cache of open keys in pages: its kernels in Triton's interpreter, and models."""

import copy
import re

import pytest
import torch
from families import CASE
from test_open_tokens import (
    WIDER,
    assert_close,
    dtypes,
    plain_attention,
    random_gates,
    shares,
    takes_kernels,
)
from torch._inductor.utils import run_and_get_code
from transformers import EncoderDecoderCache, StaticCache
from triton_tools import in_float32, interpreted_copies

from hf_moa.modeling.cache.gate_states import GatedStaticLayer
from hf_moa.modeling.cct import (
    fast_control,
    fast_control_gpu,
    open_operators,
    open_tokens,
    open_tokens_gpu,
    paged_keys_gpu,
)
from hf_moa.modeling.cct.static_compact_cache import (
    PAGE,
    CompactStaticCache,
    OpenPages,
    StaticCompactLayer,
)

pytest.importorskip("triton")

GPT2, T5 = CASE["GPT2LMHeadModel"], CASE["T5ForConditionalGeneration"]


@pytest.fixture(scope="module")
def operators():
    with interpreted_copies(fast_control_gpu, open_tokens_gpu, paged_keys_gpu) as copies:
        control, tokens, pages = copies
        yield control.CONTROL_OPERATORS | tokens.OPERATORS | pages.PAGE_OPERATORS


@pytest.fixture
def interpreted(operators, monkeypatch):
    """The kernels, also in float64; how often each is called."""
    calls = []

    def noted(name, function):
        return lambda *args: calls.append(name) or function(*args)

    def keeping_dtype(name, function):
        # what is changed in place has to stay what it is
        number = 7 if name in ("fill_pages", "attend_pages") else 0

        def run(*args):
            held = args[:number]
            if not number or held[0].dtype != torch.float64:
                return in_float32(function)(*args) if args[0].dtype == torch.float64 else function(*args)
            singles = [x.float() if x.is_floating_point() else x for x in held]
            found = in_float32(lambda *rest: function(*singles, *rest))(*args[number:])
            for x, single in zip(held, singles, strict=True):
                x.copy_(single)
            return found

        return run

    computed = {name: noted(name, keeping_dtype(name, each)) for name, each in operators.items()}
    monkeypatch.setattr(open_operators, "_open_computed_by", lambda x: computed)
    for module in (open_tokens, fast_control):
        monkeypatch.setattr(module, "may_take_kernels", takes_kernels)
    return calls


# --- the cache ------------------------------------------------------------------------------------


def new_layer(length, pages=None):
    cache = StaticCache(GPT2.build().config, max_cache_len=length)
    return StaticCompactLayer.of(cache.layers[0], pages or OpenPages())


def rank_of(gates):
    """`[B, T]` -> `[B * T + 1]`."""
    return torch.nn.functional.pad(gates.flatten().cumsum(0), (1, 0)).int()


class Held:
    """A layer, and beside it all keys and values as they should be."""

    def __init__(self, batch, heads, kv_heads, dim, length, dtype, pages=None):
        self.layer = new_layer(length, pages)
        self.batch, self.heads, self.kv_heads, self.dim = batch, heads, kv_heads, dim
        self.keys, self.values = torch.zeros(2, batch, length, kv_heads, dim, dtype=dtype)
        self.open, self.length, self.dtype = torch.zeros(batch, length), 0, dtype

    def new(self, number, share):
        """Random keys of some tokens more; those of open ones side by side."""
        place = slice(self.length, self.length + number)
        gates = random_gates(self.batch, number, share=share)
        self.open[:, place] = gates
        for held in (self.keys, self.values):
            held[:, place] = torch.randn(self.batch, number, self.kv_heads, self.dim).to(self.dtype)
        self.length += number
        taken = gates.bool()
        return (*(held[:, place][taken].flatten(1) for held in (self.keys, self.values)), rank_of(gates))

    def fill(self, number, share=0.5):
        self.layer.fill(*self.new(number, share), batch=self.batch, kv_heads=self.kv_heads)

    def check(self):
        shown = (self.open.bool() & (torch.arange(self.open.shape[1]) < self.length))[..., None, None]
        for actual, expected in zip(self.layer.spread_keys(), (self.keys, self.values), strict=True):
            assert torch.equal(actual, (expected * shown).transpose(1, 2))


@shares
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("numbers", [(1,), (70,), (32, 1, 1, 31), (5, 64, 3)])
def test_pages_hold_the_open_keys(interpreted, numbers, batch, share):
    held = Held(batch, 2, 2, 16, 80, torch.float32)
    for number in numbers:
        held.fill(number, share)
        held.check()
        assert not held.layer.rank[:, held.length + 1 :].any()  # nothing is written behind
    layer, count = held.layer, held.open.sum(dim=1)
    pages = count // PAGE + 1
    assert int(layer.pages.taken) == int(pages.clamp(max=layer.table.shape[1]).sum())
    used = layer.table[layer.table >= 0]
    assert len(used.unique()) == len(used) == int(layer.pages.taken)


def decode(held, mask, bias, query_gates, *, scaling=0.3):
    """One token more; contexts of open queries and what they should be."""
    query = torch.randn(held.batch, 1, held.heads, held.dim).to(held.dtype)
    new = held.new(1, 0.6)
    context = held.layer.step(
        query[query_gates.bool()].flatten(1),
        rank_of(query_gates),
        new,
        mask,
        bias,
        scaling=scaling,
    )
    everything = torch.ones(1, 1, 1, held.open.shape[1], dtype=torch.bool)
    expected = plain_attention(
        query, held.keys, held.values, held.open, everything if mask is None else mask, bias, scaling
    )
    taken = query_gates[:, 0].bool()
    return context.view(held.batch, held.heads, held.dim)[taken], expected[:, 0][taken]


@dtypes
@shares
@pytest.mark.covering(pairs=True)
@pytest.mark.parametrize("bias", [None, "shared", "own"])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("past", [1, 31, 32, 90])
@pytest.mark.parametrize("masked", ["past", "padding", "some", None])
def test_steps(
    interpreted, operators, past, parts, groups, bias, masked, share, dtype, tolerance, monkeypatch
):
    function = operators["attend_pages"]
    monkeypatch.setitem(function.__globals__, "_parts", lambda *_: parts)
    held = Held(3, 2, 2 // groups, 16, 100, dtype)
    held.fill(past, share)
    for _ in range(2):
        places = torch.arange(100)
        mask = (places <= held.length).view(1, 1, 1, -1)
        if masked == "padding":
            mask = mask & (places >= torch.tensor([[0], [past // 2], [past]])).view(3, 1, 1, -1)
        elif masked == "some":
            mask = mask & (torch.rand(3, 1, 1, 100) < 0.5)
        added = None
        if bias is not None:
            added = torch.randn(1 if bias == "shared" else 3, 2, 1, 100).to(dtype)
        queries = random_gates(3, 1, share=0.7)
        actual, expected = decode(held, None if masked is None else mask, added, queries)
        assert actual.dtype == dtype
        if len(actual):
            assert_close(actual, expected, tolerance)
        held.check()


@pytest.mark.parametrize("parts", [1, 2])
def test_steps_of_cross_attention(interpreted, operators, parts, monkeypatch):
    """Keys stay as they are."""
    monkeypatch.setitem(operators["attend_pages"].__globals__, "_parts", lambda *_: parts)
    held = Held(2, 2, 2, 16, 40, torch.float32)
    held.fill(40)
    kept = copy.deepcopy(held.layer)
    mask = torch.ones(2, 1, 1, 40, dtype=torch.bool)
    mask[1, ..., 20:] = False
    query = torch.randn(2, 1, 2, 16)
    for shown in (mask, None):
        context = held.layer.step(
            query.flatten(1), torch.arange(3).int(), None, shown, None, scaling=0.3
        )
        seen = torch.ones_like(mask) if shown is None else shown
        expected = plain_attention(query, held.keys, held.values, held.open, seen, None, 0.3)
        assert_close(context.view(2, 1, 2, 16), expected, 3e-6)
    for name in ("table", "rank", "cumulative_length"):
        assert torch.equal(getattr(held.layer, name), getattr(kept, name))
    assert torch.equal(held.layer.pages.taken, kept.pages.taken)


def test_what_finds_no_place_is_not_a_number(interpreted, monkeypatch):
    """Neither a page nor a position in the cache: nothing else is changed, and no result looks right."""
    monkeypatch.setattr(OpenPages, "reserve", lambda *_: None)
    pages = OpenPages(share=0.1)
    held = Held(2, 2, 2, 16, 96, torch.float32, pages)
    held.fill(28, 1.0)
    assert pages.size == 2
    found = [decode(held, None, None, torch.ones(2, 1))[0].isnan().any(dim=(1, 2)) for _ in range(20)]
    assert not torch.stack(found[:4]).any()  # the page of each holds 32
    assert found[-1].all()
    assert all(each.isnan().any() for each in held.layer.spread_keys())
    assert pages.keys.shape[0] == 3
    full = Held(1, 2, 2, 16, 3, torch.float32)
    full.fill(3)
    full.keys, full.values = (x.repeat(1, 2, 1, 1) for x in (full.keys, full.values))
    full.open = full.open.repeat(1, 2)
    query, new = torch.randn(1, 32), full.new(1, 1.0)
    before = copy.deepcopy(full.layer.rank)
    context = full.layer.step(query, torch.arange(2).int(), new, None, None, scaling=1.0)
    assert context.isnan().all()
    assert torch.equal(full.layer.rank, before)


def test_first_tokens_that_are_too_many(interpreted):
    held = Held(1, 2, 2, 16, 4, torch.float32)
    with pytest.raises(ValueError, match=r"max_cache_len must be at least the 5 tokens .*got 4"):
        held.layer.fill(
            torch.zeros(0, 32), torch.zeros(0, 32), torch.zeros(6).int(), batch=1, kv_heads=2
        )


def test_pages_grow(interpreted):
    pages = OpenPages(share=0.05)
    held = Held(2, 2, 2, 16, 300, torch.float32, pages)
    held.fill(20, 0.3)
    first = pages.size
    for _ in range(12):
        held.fill(21, 0.9)
        assert_close(*decode(held, None, None, torch.ones(2, 1)), 3e-6)
    held.check()
    assert first < pages.size < pages.most
    assert int(pages.taken) <= pages.size


@pytest.mark.parametrize("share", [0.05, 1.0])
def test_beams_change_places(interpreted, share):
    pages = OpenPages(share=share)
    held = Held(4, 2, 2, 16, 200, torch.float32, pages)
    held.fill(90, 0.8)
    for _ in range(6):
        beams = torch.randint(4, (4,))
        held.layer.reorder_cache(beams)
        held.keys, held.values, held.open = (x[beams] for x in (held.keys, held.values, held.open))
        held.check()
        held.fill(int(torch.randint(1, 12, ())))
        held.check()
    used = held.layer.table[held.layer.table >= 0]
    assert len(used.unique()) == len(used)
    assert used.max() < pages.size


def test_earlier_positions(interpreted):
    """As of a static cache, setting `cumulative_length` back forgets the later tokens."""
    held = Held(3, 2, 2, 16, 100, torch.float32)
    held.fill(90, 0.8)
    held.layer.cumulative_length.fill_(20)
    held.length, held.open[:, 20:] = 20, 0
    held.check()
    held.fill(30, 0.9)
    held.check()
    assert_close(*decode(held, None, None, torch.ones(3, 1)), 3e-6)


# --- in models ------------------------------------------------------------------------------------


def build(case, execution, **fields):
    fields = {"cct_budgets": [1, 0.5], "attention_type": "mae"} | fields
    sizes = WIDER[case.family.name] | case.family.one_layer
    return case.build(**sizes, **fields, cct_execution=execution).double()


def own_layers(cache):
    if isinstance(cache, EncoderDecoderCache):
        return [*cache.self_attention_cache.layers, *cache.cross_attention_cache.layers]
    return cache.layers


def make_cache(case, model, length, source=0, open_keys=None):
    def make(number):
        if open_keys is None:
            return StaticCache(model.config, max_cache_len=number)
        return CompactStaticCache(model.config, number, open_keys)

    if case.family.name == "t5":
        return EncoderDecoderCache(make(length), make(source))
    return make(length)


@torch.no_grad()
def in_pieces(case, model, pieces, *, padded=False, open_keys=None, between=lambda piece, model: None):
    """Logits of tokens given in pieces and their compute fractions, and the cache."""
    ids = torch.randint(5, 60, (3, sum(pieces)), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    if padded:
        mask[1, :3], mask[2, :1] = 0, 0
    inputs, key = {}, "input_ids"
    if case.family.name == "t5":
        source = case.inputs()
        inputs = {
            "attention_mask": source["attention_mask"],
            "encoder_outputs": model.get_encoder()(source["input_ids"], source["attention_mask"]),
        }
        number, key = len(source["input_ids"]), "decoder_input_ids"
        ids, mask = ids[:number], mask[:number]
    source = 0 if case.family.name == "gpt2" else inputs["attention_mask"].shape[1]
    cache = make_cache(case, model, 20, source, open_keys)
    logits, fractions, start = [], [], 0
    for i, piece in enumerate(pieces):
        between(i, model)
        place = slice(start, start + piece)
        start += piece
        if case.family.name == "gpt2":
            inputs = {"attention_mask": mask[:, :start]}
            inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)[:, place]
        inputs[key] = ids[:, place]
        output = model(**inputs, past_key_values=cache, use_cache=True)
        logits.append(output.logits)
        fractions.append(output.compute_fraction)
    return [torch.cat(logits, dim=1)[mask.bool()], torch.cat(fractions)], cache


@pytest.mark.covering
@pytest.mark.parametrize("case", [GPT2, T5], ids=["gpt2", "t5"])
@pytest.mark.parametrize("pieces", [[7], [1] * 4, [4, 1, 1, 2]], ids=str)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("attention_type", ["mha", "mae"])
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("open_keys", [None, 0.01])
def test_models_decode_as_the_dense_form_does(
    interpreted, case, pieces, padded, attention_type, norms, open_keys
):
    fields = {"attention_type": attention_type, "cct_sublayer_norm": norms}
    padded = padded and case is GPT2
    expected, _ = in_pieces(case, build(case, "dense", **fields), pieces, padded=padded)
    interpreted.clear()
    model = build(case, "sparse", **fields)
    actual, cache = in_pieces(case, model, pieces, padded=padded, open_keys=open_keys)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
    layers = own_layers(cache)
    assert {type(layer) for layer in layers} == {StaticCompactLayer}
    steps = sum(piece == 1 for piece in pieces[1:])
    if case is T5:  # its cross-attention has all its keys before the second piece
        steps *= 2
    assert interpreted.count("attend_pages") == steps * model.config.num_hidden_layers
    assert len({id(layer.pages) for layer in layers}) == (
        len(layers) if open_keys is None else 2 if case is T5 else 1
    )


@pytest.mark.parametrize("case", [GPT2, T5], ids=["gpt2", "t5"])
@pytest.mark.parametrize("then", ["dense", "eager"])
def test_a_cache_serves_other_forms(interpreted, case, then):
    """From the third piece on everything is computed, or attention gives its probabilities."""

    def change(piece, model):
        if piece == 2 and then == "dense":
            model.set_cct_execution("dense")
        elif piece == 2:
            model.set_attn_implementation("eager")

    pieces = [6, 1, 1, 2]
    expected, _ = in_pieces(case, build(case, "dense"), pieces)
    actual, cache = in_pieces(case, build(case, "sparse"), pieces, between=change)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
    kind = GatedStaticLayer if then == "dense" else StaticCompactLayer
    assert {type(layer) for layer in own_layers(cache)} == {kind}


@torch.no_grad()
def test_a_classifier_goes_on_behind_a_cache(interpreted):
    """Its last layer has one query for several keys."""
    case, found = CASE["GPT2ForSequenceClassification"], []
    ids = torch.randint(5, 60, (2, 9))
    for execution in ("dense", "sparse"):
        model = build(case, execution)
        cache = StaticCache(model.config, max_cache_len=12)
        for piece in ids.split((4, 1, 4), dim=1):
            found.append(model(piece, past_key_values=cache).logits)
    torch.testing.assert_close(found[3:], found[:3], atol=1e-4, rtol=1e-4)
    assert {type(layer) for layer in cache.layers} == {StaticCompactLayer}


@pytest.mark.parametrize("execution", ["dense", "sparse"])
def test_without_kernels_it_is_a_static_cache(execution):
    """On a CPU."""
    expected, _ = in_pieces(GPT2, build(GPT2, "dense"), [6, 1, 2])
    actual, cache = in_pieces(GPT2, build(GPT2, execution), [6, 1, 2], open_keys=0.5)
    torch.testing.assert_close(actual, expected)
    assert {type(layer) for layer in cache.layers} == {GatedStaticLayer}
    cache.reserve()


@torch.no_grad()
@pytest.mark.parametrize(
    ("case", "beams", "open_keys"),
    [(GPT2, 1, 0.01), (GPT2, 2, None), (T5, 2, 0.01)],
    ids=["gpt2", "gpt2 with beams", "t5 with beams"],
)
def test_generation(interpreted, case, beams, open_keys):
    inputs = case.inputs()
    inputs.pop("decoder_input_ids", None)
    if case is GPT2:
        inputs = {key: x.flip(1) for key, x in inputs.items()}  # padding on the left
    options = {"max_new_tokens": 4, "do_sample": False, "num_beams": beams, "output_logits": True}
    options |= {"return_dict_in_generate": True}
    expected = build(case, "dense").generate(**inputs, **options)
    model = build(case, "sparse")
    interpreted.clear()
    if open_keys is None:
        options["cache_implementation"] = "static"
    else:
        length = inputs["input_ids"].shape[1]
        options["past_key_values"] = make_cache(case, model, length + 4, length, open_keys)
    found = model.generate(**inputs, **options)
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(found.logits, expected.logits, atol=1e-4, rtol=1e-4)
    assert interpreted.count("attend_pages") >= 3 * model.config.num_hidden_layers
    assert {type(layer) for layer in own_layers(found.past_key_values)} == {StaticCompactLayer}


def test_a_cache_that_is_reset(interpreted):
    model = build(GPT2, "sparse")
    expected, cache = in_pieces(GPT2, model, [6, 1, 1], open_keys=0.5)
    cache.reset()
    assert cache.get_seq_length() == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "make_cache", lambda *_: cache)
        actual, _ = in_pieces(GPT2, model, [6, 1, 1])
    assert all(map(torch.equal, actual, expected))


@torch.no_grad()
def test_memory_falls_with_the_open_keys(interpreted):
    """Of two sequences, a tenth of whose gates are open."""
    model = build(GPT2, "sparse")
    ids, sizes = torch.randint(5, 60, (2, 30)), []
    for share in (1.0, 0.1):
        model.set_cct_gates(share)
        cache = CompactStaticCache(model.config, 1000, open_keys=share)
        model(ids, past_key_values=cache)
        sizes.append(cache.pages.keys.numel())
        assert int(cache.pages.taken) <= cache.pages.size
    assert sizes[1] < 0.2 * sizes[0]
    full = len(cache.layers) * 2 * 1000 * model.config.n_embd
    assert sizes[0] < 1.05 * full


def test_layers_on_several_devices():
    first, other = CompactStaticCache(GPT2.build().config, 10).layers[:2]
    states = torch.empty(2, 2, 0, 16)
    first.lazy_initialization(states, states)
    with pytest.raises(
        ValueError, match=r"layers on one device.*got meta behind cpu\): use a StaticCache"
    ):
        other.lazy_initialization(states.to("meta"), states.to("meta"))


@pytest.mark.parametrize("open_keys", [0, 1.5, True, "half"])
def test_a_share_that_is_none(open_keys):
    with pytest.raises(ValueError, match=r"open_keys must be a number in \(0, 1\]"):
        CompactStaticCache(GPT2.build().config, 10, open_keys)


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.parametrize("open_keys", [None, 0.5])
def test_a_compiled_step_copies_no_keys(interpreted, open_keys):
    """It is one graph for all steps, which changes the pages in place, shared ones too."""
    ids, found = torch.randint(5, 60, (2, 8)), []
    fields = {"cct_budgets": [1, 0.5], "attention_type": "mha", "cct_execution": "sparse"}
    model = GPT2.build(**WIDER["gpt2"], **fields)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True)

    def step(run, i, cache):
        return run(ids[:, i : i + 1], past_key_values=cache).logits

    for run in (model, compiled):
        cache = make_cache(GPT2, model, 16, open_keys=open_keys)
        logits = [model(ids[:, :5], past_key_values=cache).logits]
        if run is compiled:
            first, sources = run_and_get_code(step, run, 5, cache)
        else:
            first = step(run, 5, cache)
        with torch.compiler.set_stance("fail_on_recompile" if run is compiled else "default"):
            logits += [first, step(run, 6, cache), step(run, 7, cache)]
        found.append(torch.cat(logits, dim=1))
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)
    assert interpreted.count("attend_pages") == 2 * 3 * model.config.n_layer
    # what the operators change are the graph's arguments
    (source,) = sources
    calls = re.findall(r"attend_pages\.default\((\w+), (\w+), (\w+), (\w+), (\w+), (\w+)", source)
    assert len(calls) == model.config.n_layer
    assert all(name.startswith("arg") for call in calls for name in call)
