"""CCT's form for GPUs, as far as it can be tried without one: Triton's interpreter runs its kernels on a
CPU, and what runs around them takes tensors without numbers."""

import contextlib
import itertools
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from families import CASE, each_gated_variant
from torch import nn
from torch._subclasses import FakeTensorMode
from triton_tools import Launcher, in_float32, interpreted_copies

from hf_moa import MoaBertConfig
from hf_moa.modeling.attention.flow import AttentionCall
from hf_moa.modeling.bert.layers import MoaBertLayer
from hf_moa.modeling.cct import (
    fast_control,
    fast_control_gpu,
    open_operators,
    open_tokens,
    open_tokens_gpu,
)

JITFunction = pytest.importorskip("triton").JITFunction

ACTIVATIONS = {
    "": lambda x: x,
    "relu": torch.relu,
    "gelu": nn.functional.gelu,
    "gelu_tanh": lambda x: nn.functional.gelu(x, approximate="tanh"),
    "silu": nn.functional.silu,
}
dtypes = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 3e-6), (torch.float16, 4e-3)], ids=["float32", "float16"]
)
shares = pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])


@pytest.fixture(scope="module")
def copies():
    with interpreted_copies(open_tokens_gpu, fast_control_gpu) as found:
        yield found


@pytest.fixture
def interpreted(copies):
    return copies[0]


@pytest.fixture
def control(copies):
    return copies[1]


def takes_kernels(execution, x):
    """In the place of `may_take_kernels`: on a CPU, too."""
    return execution == "sparse" and not torch.is_grad_enabled()


def random_gates(*shape, share=0.5):
    return (torch.rand(shape) < share).float()


def assert_close(actual, expected, tolerance):
    """To a share of the largest."""
    largest = max(expected.abs().max().item(), 1e-3)
    torch.testing.assert_close(actual.double(), expected.double(), rtol=0, atol=tolerance * largest)


# --- in order -------------------------------------------------------------------------------------


@shares
@pytest.mark.parametrize("parts", [1, 2, 3, 4])
@pytest.mark.parametrize("number", [1, 128, 777])
def test_order(interpreted, number, parts, share):
    gates = random_gates(number, parts, share=share)
    order, rank, patterns, by_pattern = interpreted.order_tokens(gates, True)
    is_open = gates.bool()
    for part in range(parts):
        expected = torch.cat([is_open[:, part].nonzero(), (~is_open[:, part]).nonzero()]).flatten()
        assert torch.equal(order[part].long(), expected)
        counted = nn.functional.pad(is_open[:, part].cumsum(0), (1, 0))
        assert torch.equal(rank[part].long(), counted)
    bits = (is_open * 2 ** torch.arange(parts)).sum(dim=1)
    assert torch.equal(patterns.long(), bits)
    assert torch.equal(by_pattern.long().sort().values, torch.arange(number))
    in_order = bits[by_pattern.long()]
    changes = torch.unique_consecutive(in_order)
    assert len(changes) == len(bits.unique())  # each pattern is in one place
    if len(changes) == 2**parts:  # and its neighbours differ from it in one gate
        assert all(int(a ^ b).bit_count() == 1 for a, b in itertools.pairwise(changes))
    if (bits == 0).any():
        assert in_order[-1] == 0
    plain = interpreted.order_tokens(gates, False)
    assert all(map(torch.equal, plain[:3], (order, rank, patterns)))
    assert plain[3].numel() == 0


# --- gates ----------------------------------------------------------------------------------------


@dtypes
@pytest.mark.parametrize(
    ("number", "width", "hidden", "gates"),
    [(1, 16, 16, 1), (70, 48, 32, 2), (17, 64, 192, 4), (2100, 16, 16, 3), (5, 32, 16, 16)],
)
def test_control_networks(control, number, width, hidden, gates, dtype, tolerance):
    x = torch.randn(number, width).to(dtype)
    weight, out_weight = (torch.randn(hidden, width) / 7).to(dtype), torch.randn(gates, hidden).to(dtype)
    bias, out_bias = torch.randn(hidden).to(dtype), torch.randn(gates).to(dtype)
    actual = control.control_logits(x, weight, bias, out_weight, out_bias)
    hidden_states = torch.relu(x.double() @ weight.double().t() + bias.double())
    assert actual.dtype == dtype
    assert_close(actual, hidden_states @ out_weight.double().t() + out_bias.double(), tolerance)


# --- products -------------------------------------------------------------------------------------


@dtypes
@shares
@pytest.mark.covering(pairs=True)
@pytest.mark.parametrize("at_tokens", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("strides", ["linear", "conv1d", "of both"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("gates", [(0,), (0, 1, 1), (0, 1, 2, 3), (1, 0)])
def test_projections(interpreted, gates, activation, strides, bias, at_tokens, share, dtype, tolerance):
    number, width, sizes = 150, 48, [32, 64, 64, 16][: len(gates)]
    if at_tokens:
        sizes = [32] * len(gates)
    x = torch.randn(number, width).to(dtype)
    is_open = random_gates(number, max(gates) + 1, share=share)
    weight = torch.randn(sum(sizes), width).to(dtype) / 7
    weights = list((weight if strides == "linear" else weight.t().contiguous().t()).split(sizes))
    if strides == "of both":
        weights[0] = weights[0].contiguous()
    biases = list(torch.randn(sum(sizes)).to(dtype).split(sizes)) if bias else []
    order, rank, _, _ = interpreted.order_tokens(is_open, False)
    found = interpreted.project_tokens(x, order, rank, weights, biases, gates, activation, at_tokens)
    if at_tokens:
        assert found[0].shape == (number, sum(sizes))
        found = found[0].split(sizes, dim=1)
    for part, gate in enumerate(gates):
        added = biases[part].double() if bias else 0.0
        expected = ACTIVATIONS[activation](x.double() @ weights[part].double().t() + added)
        taken = is_open[:, gate].bool()
        actual = found[part][taken] if at_tokens else found[part][: int(taken.sum())]
        assert actual.dtype == dtype
        if len(actual):
            assert_close(actual, expected[taken], tolerance)


@dtypes
@shares
@pytest.mark.covering(pairs=True)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("parts", [1, 2, 3, 4])
@pytest.mark.parametrize("number", [1, 300])
def test_combinations(interpreted, number, parts, transposed, bias, share, dtype, tolerance):
    width, size = 32, 48
    is_open = random_gates(number, parts, share=share)
    x = torch.randn(number, parts, width).to(dtype)
    weight = torch.randn(size, parts * width).to(dtype) / 7
    weight = weight.t().contiguous().t() if transposed else weight
    added = torch.randn(size).to(dtype) if bias else None
    order, _, patterns, by_pattern = interpreted.order_tokens(is_open, True)
    gated = (x.double() * is_open.unsqueeze(-1)).flatten(1)
    expected = gated @ weight.double().t() + (added.double() if bias else 0.0)
    x[~is_open.bool()] = float("nan")  # what is closed holds anything
    x = x.flatten(1)
    for tokens in (by_pattern, order[0]):
        actual = interpreted.combine_tokens(x, tokens, patterns, weight, added, parts)
        assert actual.dtype == dtype
        assert_close(actual, expected, tolerance)


# --- attention ------------------------------------------------------------------------------------


def plain_attention(query, key, value, gates, mask, bias, scaling):
    """Of `[B, T, h, dh]` and `[B, S, kv_heads, dh]` in float64; a query that sees nothing gives zero."""
    groups = query.shape[2] // key.shape[2]
    q, k, v = (x.double().transpose(1, 2) for x in (query, key, value))
    k, v = (x.repeat_interleave(groups, dim=1) * gates[:, None, :, None] for x in (k, v))
    scores = q @ k.mT * scaling + (0.0 if bias is None else bias.double())
    scores = scores.masked_fill(~mask, float("-inf"))
    weights = scores.softmax(dim=-1).nan_to_num(0.0)
    return (weights @ v).transpose(1, 2)


def make_mask(kind, batch, length, keys):
    real = torch.ones(batch, keys, dtype=torch.bool)
    real[0, keys // 2 :] = False
    real[-1, : keys // 3] = False
    pairs = torch.ones(length, keys, dtype=torch.bool)
    return {
        "none": (None, pairs),
        "causal": (None, pairs.tril()),
        "padding": (real[:, None, None], real[:, None, None]),
        "causal padding": (real[:, None, None] & pairs.tril(),) * 2,
        "one for all": ((torch.rand(1, 1, length, keys) < 0.4),) * 2,
    }[kind]


@dtypes
@shares
@pytest.mark.covering(pairs=True)
@pytest.mark.parametrize("bias", [None, "shared", "own"])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("lengths", [(70, 70), (1, 90), (9, 9), (5, 33)])
@pytest.mark.parametrize("kind", ["none", "causal", "padding", "causal padding", "one for all"])
def test_attention(interpreted, kind, lengths, groups, bias, share, dtype, tolerance):
    (length, keys), batch, heads, dim = lengths, 3, 4, 16
    causal = kind == "causal"
    if causal and length != keys:
        length = keys
    given, mask = make_mask(kind, batch, length, keys)
    query = torch.randn(batch, length, heads, dim).to(dtype)
    key, value = torch.randn(2, batch, keys, heads // groups, dim).to(dtype)
    query_gates, key_gates = (
        random_gates(batch, length, share=0.6),
        random_gates(batch, keys, share=share),
    )
    added = None
    if bias is not None:
        added = torch.randn(1 if bias == "shared" else batch, heads, length, keys).to(dtype)
    of_queries = interpreted.order_tokens(query_gates.view(-1, 1), False)
    of_keys = interpreted.order_tokens(key_gates.view(-1, 1), False)

    def in_order(x, tokens):
        return x.flatten(0, 1).flatten(1)[tokens[0][0].long()]

    context = interpreted.attend_tokens(
        in_order(query, of_queries),
        in_order(key, of_keys),
        in_order(value, of_keys),
        of_queries[0][0],
        of_queries[1][0],
        of_keys[0][0],
        of_keys[1][0],
        given,
        added,
        batch,
        dim,
        0.3,
        causal,
    )
    expected = plain_attention(query, key, value, key_gates, mask, added, 0.3)
    taken = query_gates.bool()
    actual = context.view(expected.shape)[taken]
    assert actual.dtype == dtype
    assert_close(actual, expected[taken], tolerance)


# --- in models ------------------------------------------------------------------------------------


WIDER = {
    "bert": {"hidden_size": 64, "intermediate_size": 64},
    "gpt2": {"n_embd": 64, "n_inner": 64},
    "t5": {"d_kv": 16, "d_ff": 64},
}


@pytest.fixture
def taken(interpreted, control, monkeypatch):
    """Layers in float64 take this form; what it computes."""
    calls = []

    def noted(name, function):
        return lambda *args: calls.append(name) or function(*args)

    computed = control.CONTROL_OPERATORS | interpreted.OPERATORS
    operators = {name: noted(name, in_float32(each)) for name, each in computed.items()}
    monkeypatch.setattr(open_operators, "_open_computed_by", lambda x: operators)
    for module in (open_tokens, fast_control):
        monkeypatch.setattr(module, "may_take_kernels", takes_kernels)
    return calls


@torch.no_grad()
@pytest.mark.covering
@pytest.mark.parametrize("padding", ["right", "left", "none"])
@each_gated_variant
def test_models_compute_what_the_dense_form_does(case, fields, padding, taken):
    inputs = case.inputs_padded(padding)
    if fields.get("cct_full_budget_is_plain"):
        inputs["budget"] = 0.5
    if case.family.name != "bert":
        inputs["use_cache"] = False
    outputs = []
    for execution in ("dense", "sparse"):
        sizes = WIDER[case.family.name] | case.family.one_layer
        model = case.build(**sizes, cct_execution=execution, **fields).double()
        outputs.append(model(**inputs))
        skips = {name for name in taken if name != "control_logits"}
        assert bool(skips) is (execution == "sparse" and fields.get("attention_type") != "moa")
    dense, sparse = outputs
    assert (dense.compute_fraction < 0.95).any()  # else there is nothing to skip
    real = ... if case.family.name == "t5" or padding == "none" else inputs["attention_mask"].bool()
    torch.testing.assert_close(sparse.logits[real], dense.logits[real], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(sparse.compute_fraction, dense.compute_fraction)
    assert "control_logits" in taken
    if skips:  # feed-forward layers, too: in one product of all parts, or in each part's
        name = "combine_tokens" if fields.get("cct_sublayer_norm") is False else "project_tokens"
        assert taken.count(name) > 1.5 * taken.count("attend_tokens")


@torch.no_grad()
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "T5ForConditionalGeneration"])
def test_attention_without_a_kernel(name, implementation, taken):
    """Of masks that are added to the scores, and behind a cache."""
    case = CASE[name]
    found = []
    for execution in ("dense", "sparse"):
        fields = {"cct_budgets": [1, 0.5], "cct_sublayer_norm": False, "cct_execution": execution}
        fields["attn_implementation"] = implementation
        model = case.build(**WIDER[case.family.name], **fields).double()
        output = model(**case.inputs(), use_cache=True)
        cache = output.past_key_values
        found.append(
            [
                output.logits,
                *(layer.keys for layer in getattr(cache, "self_attention_cache", cache).layers),
            ]
        )
    for dense, sparse in zip(*found, strict=True):
        torch.testing.assert_close(sparse, dense, atol=1e-4, rtol=1e-4)
    assert "project_tokens" in taken
    # T5's encoder has no cache
    assert ("attend_tokens" in taken) is (
        name == "T5ForConditionalGeneration" and implementation == "sdpa"
    )


@torch.no_grad()
@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "T5ForConditionalGeneration"])
def test_generation(name, taken):
    """With a dynamic cache; `test_static_compact_cache.py` has static ones."""
    case, inputs = CASE[name], CASE[name].inputs()
    inputs.pop("decoder_input_ids", None)
    if case.family.name == "gpt2":
        inputs = {key: x.flip(1) for key, x in inputs.items()}  # padding on the left
    found = []
    for execution in ("dense", "sparse"):
        fields = {"cct_budgets": [1, 0.5], "cct_sublayer_norm": False, "cct_execution": execution}
        model = case.build(**WIDER[case.family.name], **fields, attention_type="mae").double()
        options = {"max_new_tokens": 5, "do_sample": False, "output_logits": True}
        options |= {"return_dict_in_generate": True}
        found.append(model.generate(**inputs, **options))
    dense, sparse = found
    assert torch.equal(sparse.sequences, dense.sequences)
    torch.testing.assert_close(sparse.logits, dense.logits, atol=1e-4, rtol=1e-4)
    assert taken.count("project_tokens") >= 4 * 5


@torch.no_grad()
def test_of_one_token(taken):
    """A classifier's last layer has one query for each sequence."""
    case = CASE["BertForSequenceClassification"]
    found = []
    for execution in ("dense", "sparse"):
        fields = {"cct_budgets": [1, 0.5], "cct_sublayer_norm": False, "cct_execution": execution}
        found.append(case.build(**WIDER["bert"], **fields).double()(**case.inputs()).logits)
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)
    assert (
        taken.count("order_tokens") == 2 + 1 + 2
    )  # the last layer's queries and keys in orders of their own


@torch.no_grad()
def test_an_output_projection_that_is_not_plain(taken):
    case = CASE["BertModel"]
    model = case.build(**WIDER["bert"], cct_budgets=[1, 0.5], cct_execution="sparse").double()
    expected = model(**case.inputs())[0]
    number = taken.count("combine_tokens")
    for layer in model.encoder.layer:
        layer.attention.output.dense.register_forward_hook(lambda *_: None)
    actual = model(**case.inputs())[0]
    assert taken.count("combine_tokens") == number > 0
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize(
    "name",
    [
        "BertModel",
        pytest.param("GPT2LMHeadModel", marks=pytest.mark.slow),
        pytest.param("T5ForConditionalGeneration", marks=pytest.mark.slow),
    ],
)
def test_a_compiler_takes_models_whole(name, taken):
    case = CASE[name]
    fields = {"cct_budgets": [1, 0.5], "cct_sublayer_norm": False, "cct_execution": "sparse"}
    model = case.build(**WIDER[case.family.name], **case.family.one_layer, **fields).double()
    inputs = case.inputs() | ({} if case.family.name == "bert" else {"use_cache": False})
    expected = model(**inputs)[0]
    number = len(taken)
    torch.compiler.reset()
    actual = torch.compile(model, backend="aot_eager", fullgraph=True)(**inputs)[0]
    assert len(taken) == 2 * number > 0
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


# --- without numbers ------------------------------------------------------------------------------


OPERATORS = fast_control_gpu.CONTROL_OPERATORS | open_tokens_gpu.OPERATORS


def without_kernels(monkeypatch, *modules):
    """Let operators run on fake tensors of a GPU; return what PyTorch is told of their shapes."""
    for module in modules:
        for name, each in vars(module).items():
            if isinstance(each, JITFunction):
                monkeypatch.setattr(module, name, Launcher())
        if hasattr(module, "resident_programs"):
            monkeypatch.setattr(module, "resident_programs", lambda device: 264)
    monkeypatch.setattr(torch.cuda, "device_of", contextlib.nullcontext)
    fakes = {}
    stand_in = {
        name: SimpleNamespace(register_fake=partial(fakes.__setitem__, name))
        for name in open_operators._OPEN_SCHEMAS
    }
    open_operators._register_open_shapes(stand_in)
    return fakes


_NAMES = ["control_logits", "order_tokens", "project_tokens", "combine_tokens", "attend_tokens"]


@pytest.mark.filterwarnings("ignore:CUDA is not available")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_what_runs_around_the_kernels_waits_for_no_number(masked, dtype, monkeypatch):
    """On fake tensors of a GPU, which raise where a number is asked for."""
    fakes = without_kernels(monkeypatch, fast_control_gpu, open_tokens_gpu)
    with FakeTensorMode(), torch.device("cuda"):
        x, weight = torch.empty(3 * 70, 32, dtype=dtype), torch.empty(64, 32, dtype=dtype)
        gates = torch.empty(3 * 70, 2, dtype=dtype)
        order, rank, patterns, by_pattern = open_tokens_gpu.order_tokens(gates, True)
        mask = torch.empty(3, 1, 70, 70, dtype=torch.bool) if masked else None
        bias = torch.empty(1, 2, 70, 70, dtype=dtype) if masked else None
        order_of = (each for both in zip(order.unbind(), rank.unbind(), strict=True) for each in both)
        calls = [
            ("control_logits", (x, weight, *(torch.empty(n, dtype=dtype) for n in (64, (3, 64), 3)))),
            ("order_tokens", (gates, True)),
            ("order_tokens", (gates, False)),
            ("project_tokens", (x, order, rank, [weight, weight], [], (0, 1), "", False)),
            ("project_tokens", (x, order, rank, [weight, weight], [], (0, 1), "gelu", True)),
            ("combine_tokens", (x, by_pattern, patterns, weight, None, 2)),
            ("attend_tokens", (x, x, x, *order_of, mask, bias, 3, 16, 0.25, not masked)),
        ]
        for name, arguments in calls:
            found, said = OPERATORS[name](*arguments), fakes[name](*arguments)
            found, said = ([each] if isinstance(each, torch.Tensor) else each for each in (found, said))
            shapes = [[(t.shape, t.dtype, t.device) for t in each] for each in (found, said)]
            assert shapes[0] == shapes[1], name


def test_operators_have_the_kernels_schemas():
    assert list(OPERATORS) == _NAMES
    for name, function in OPERATORS.items():
        assert (
            torch.library.infer_schema(function, mutates_args=()) == open_operators._OPEN_SCHEMAS[name]
        )


FITS = {"dtype": torch.bfloat16, "width": 64, "ffn": 256, "splits": 4, "heads": 4}


@pytest.mark.filterwarnings("ignore:CUDA is not available")
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, (True, True)),
        ({"dtype": torch.float16}, (True, True)),
        ({"dtype": torch.float32}, (False, False)),
        ({"execution": "auto"}, (False, False)),
        ({"execution": "dense"}, (False, False)),
        ({"device": "cpu"}, (False, False)),
        ({"has_driver": False}, (False, False)),
        ({"has_grad": True}, (False, False)),
        ({"training": True}, (False, False)),
        ({"width": 72, "heads": 9}, (False, False)),  # heads of 8
        ({"width": 48, "heads": 1}, (True, True)),  # of 48
        ({"ffn": 96}, (True, False)),  # parts of 24
        ({"splits": 8}, (True, False)),
        ({"attention_type": "moa", "num_attention_experts": 8}, (False, True)),
        ({"hook": "attention.self.key"}, (False, True)),
        ({"hook": "output.dense"}, (True, False)),
        ({"without_bias": "attention.self.key"}, (False, True)),
        ({"without_bias": "output.dense"}, (True, True)),
    ],
)
def test_where_it_is_taken(change, expected, monkeypatch):
    others = {"device": "cuda", "has_driver": True, "has_grad": False, "training": False, "hook": None}
    others |= {"execution": "sparse", "without_bias": None}
    settings = FITS | others | change
    monkeypatch.setattr(open_operators, "kernels_run_on", lambda device: settings["has_driver"])
    config = MoaBertConfig(
        hidden_size=settings["width"],
        num_attention_heads=settings["heads"],
        intermediate_size=settings["ffn"],
        num_hidden_layers=1,
        cct_num_ffn_splits=settings["splits"],
        cct_execution=settings["execution"],
        cct_budgets=[1, 0.5],
        cct_sublayer_norm=False,
        **{name: value for name, value in change.items() if name in vars(MoaBertConfig())},
    )
    layer = MoaBertLayer(config, 0).to(settings["dtype"]).train(settings["training"])
    if settings["hook"] is not None:
        layer.get_submodule(settings["hook"]).register_forward_hook(lambda *_: None)
    if settings["without_bias"] is not None:
        layer.get_submodule(settings["without_bias"]).bias = None
    with FakeTensorMode(allow_non_fake_inputs=True), torch.set_grad_enabled(settings["has_grad"]):
        x = torch.empty(2, 5, settings["width"], device=settings["device"], dtype=settings["dtype"])
        call = AttentionCall(x, x, None, None, None, None, None, None, None, {})
        attention, gate = layer.attention.self, layer.feed_forward_gate
        gates = torch.empty(2, 5, settings["splits"], device=settings["device"])
        found = (
            open_tokens.attends_open_tokens(attention.cct, attention, call),
            open_tokens.computes_open_slices(
                gate, x, gates, [layer.intermediate.dense], layer.output.dense
            ),
        )
    assert found == expected
