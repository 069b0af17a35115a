"""The causal gate's form for GPUs, as far as it can be tried without one: Triton's interpreter runs its
kernels on a CPU, and what runs around them takes tensors without numbers."""

import contextlib
import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from common import assert_same_with_gradients, batch, hidden
from families import CASE
from layers import attention_layer
from references import mae_attention
from torch._subclasses import FakeTensorMode
from transformers import DynamicCache, StaticCache
from triton_tools import Launcher, in_float32, interpreted_copy

from hf_moa import FTGConfig
from hf_moa.modeling.ftg.layer import FTGLayer
from hf_moa.modeling.mae import fast_gate, fast_gate_gpu, mixture
from hf_moa.modeling.mae.gate import MaeGate
from hf_moa.modeling.mae.pooling import windowed_mean

JITFunction = pytest.importorskip("triton").JITFunction

dtypes = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float16, 4e-3)], ids=["float32", "float16"]
)
SIZES = [
    # sequences, tokens, features, experts, window
    (2, 70, 32, 4, 7),
    (1, 150, 64, 20, 100),
    (3, 5, 16, 66, 1),
    (2, 66, 128, 12, 300),
]
sizes = pytest.mark.parametrize("size", SIZES, ids=["x".join(map(str, size)) for size in SIZES])
paddings = pytest.mark.parametrize("padding", ["none", "left", "holes"])


@pytest.fixture(scope="module")
def interpreted():
    with interpreted_copy(fast_gate_gpu) as module:
        yield module


def real_tokens(padding, batch, length):
    if padding == "none":
        return None
    valid = torch.ones(batch, length, dtype=torch.bool)
    if padding == "left":
        valid[0, : length // 2] = False
    else:
        valid = torch.rand(batch, length) < 0.7
        valid[-1] = False  # a sequence of nothing
    return valid


def plain_gates(features, valid, kept, weight, bias, length, window, dropout):
    mean = windowed_mean(features, valid, window)[:, features.shape[1] - length :]
    active = mean.tanh()
    if kept is not None:
        active = active * kept / (1 - dropout)
    return (active @ weight.T + bias).softmax(dim=-1)


def plain_moments(x, valid, window):
    means = windowed_mean(x, valid, window)
    valid = torch.ones(x.shape[:2]) if valid is None else valid
    weight = valid.to(x.dtype).unsqueeze(-1)
    numbers = weight.sum(dim=1)
    averages = (weight * means).sum(dim=1) / numbers.clamp(min=1)
    squares = (weight * (means - averages.unsqueeze(1)).square()).sum(dim=1)
    return averages, squares, numbers.squeeze(-1)


def assert_close(actual, expected, tolerance):
    """To a share of the largest."""
    for a, e in zip(actual, expected, strict=True):
        largest = max(e.abs().max().item(), 1e-3)
        torch.testing.assert_close(a.double(), e, rtol=0, atol=tolerance * largest)


@sizes
@dtypes
@paddings
@pytest.mark.covering(pairs=True)
@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_gates(interpreted, size, padding, dropout, dtype, tolerance):
    batch, length, features, experts, window = size
    x = torch.randn(batch, length, features)
    weight, bias = torch.randn(experts, features), torch.randn(experts)
    kept = torch.rand(batch, length, features) >= dropout if dropout else None
    valid = real_tokens(padding, batch, length)
    x, weight, bias, grad = (t.to(dtype) for t in (x, weight, bias, torch.randn(batch, length, experts)))
    leaves = [t.double().requires_grad_() for t in (x, weight, bias)]
    expected = plain_gates(leaves[0], valid, kept, *leaves[1:], length, window, dropout)
    arguments = x, valid, kept, weight, bias, length, window, dropout
    gates, active, counts = interpreted.window_gates(*arguments, True)
    assert gates.dtype == torch.float32
    assert torch.equal(gates, interpreted.window_gates(*arguments, False)[0])
    assert_close([gates], [expected], tolerance)
    if valid is not None:
        grad = grad.masked_fill(~valid.unsqueeze(-1), 0.0)  # nobody asks for padding's gates
    backward = grad, gates, active, counts, valid, kept, weight, window, dropout
    found = interpreted.window_gates_backward(*backward)
    assert {each.dtype for each in found} == {dtype}
    assert_close(found, torch.autograd.grad(expected, leaves, grad.double()), tolerance)


@paddings
@pytest.mark.parametrize("window", [3, 80])
def test_gates_behind_earlier_tokens(interpreted, window, padding):
    held, length = 90, 11
    x, weight, bias = torch.randn(2, held, 16), torch.randn(5, 16), torch.randn(5)
    valid = real_tokens(padding, 2, held)
    gates, *_ = interpreted.window_gates(x, valid, None, weight, bias, length, window, 0.0, False)
    expected = plain_gates(x.double(), valid, None, weight.double(), bias, length, window, 0.0)
    assert_close([gates], [expected], 1e-6)


@sizes
@dtypes
@paddings
@pytest.mark.covering(pairs=True)
@pytest.mark.parametrize("away", [0.0, 30.0])
def test_moments(interpreted, size, padding, away, dtype, tolerance):
    """Also of inputs whose mean is large."""
    batch, length, width, _, window = size
    x = (torch.randn(batch, length, width) + away).to(dtype)
    valid = real_tokens(padding, batch, length)
    leaf = x.double().requires_grad_()
    averages, squares, numbers = interpreted.window_moments(x, valid, window)
    expected = plain_moments(leaf, valid, window)
    assert_close([averages, squares, numbers], expected, 1e-4 if away else 1e-5)
    grads = torch.randn(2, batch, width)
    found = interpreted.window_moments_backward(*grads, x, valid, averages, numbers, window)
    assert found.dtype == dtype
    wanted = torch.autograd.grad(expected[:2], leaf, list(grads.double()))
    assert_close([found], wanted, 1e-4 if away and dtype == torch.float32 else tolerance)


@pytest.fixture
def in_layers(interpreted, monkeypatch):
    """Layers in float64 take this form."""
    operators = {name: in_float32(function) for name, function in interpreted.OPERATORS.items()}
    monkeypatch.setattr(fast_gate, "_computed_by", lambda x: operators)
    monkeypatch.setattr(mixture, "is_fast", lambda *args: True)


FIELDS = {"attention_type": "mae", "mae_gate_dropout": 0.0, "mae_gate_hidden_size": 16}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("backbone", ["bert-decoder", "gpt2", "t5-decoder"])
def test_a_layer_is_the_sum_over_experts(interpreted, in_layers, backbone, training):
    layer = attention_layer(backbone, **FIELDS, mae_gate_window=3).train(training)
    x, mask = hidden()
    actual, _ = layer(x, mask)
    expected = mae_attention(layer.core, layer.weights, x, mask)
    assert_same_with_gradients(actual[mask], expected[mask], [x, *layer.parameters()], atol=1e-4)


def make_gate(*, dropout=0.0, width=32):
    torch.manual_seed(0)
    gate = MaeGate(hidden_size=width, num_experts=4, gate_hidden_size=16, dropout=dropout).double()
    with torch.no_grad():
        for tensor in (*gate.parameters(), gate.norm.running_mean, gate.norm.running_var):
            tensor.add_(torch.rand_like(tensor))
    return gate


def both_forms(gate, x, valid, window=5):
    """What both give in training, each with a copy of the gate."""
    found = []
    for is_fast in (True, False):
        own, leaf = copy.deepcopy(gate), x.clone().requires_grad_()
        torch.manual_seed(1)
        if is_fast:
            gates = fast_gate.fast_gates(own, leaf, valid, window=window, past=None)
        else:
            gates = own(windowed_mean(leaf, valid, window), valid, dtype=torch.float64)
        real = gates if valid is None else gates[valid]
        real.sin().sum().backward()
        found.append(([real, leaf.grad, *(p.grad for p in own.parameters())], own.norm.state_dict()))
    return found


@pytest.mark.parametrize("padding", ["none", "holes"])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_batchs_statistics(in_layers, frozen, padding):
    gate, x = make_gate(), torch.randn(3, 20, 32, dtype=torch.float64)
    gate.norm.requires_grad_(not frozen)
    (actual, fast), (expected, plain) = both_forms(gate, x, real_tokens(padding, 3, 20))
    for a, e in zip(actual, expected, strict=True):
        assert (a is None) is (e is None)
        if a is not None:
            torch.testing.assert_close(a, e, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(fast, plain)
    assert plain["num_batches_tracked"] == (0 if frozen else 1)


def test_one_token_has_no_variance(in_layers):
    x = torch.randn(1, 1, 32, dtype=torch.float64)
    (actual, fast), (expected, plain) = both_forms(make_gate(), x, None)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(fast, plain)


def test_statistics_of_all_processes(in_layers, tmp_path):
    gate, x = make_gate(), torch.randn(3, 20, 32, dtype=torch.float64)
    gate.norm.is_global = True
    expected = both_forms(gate, x, None)[1]
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        for actual in both_forms(gate, x, None):
            torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    finally:
        dist.destroy_process_group()


def test_dropout_keeps_its_share(in_layers):
    gate, x = make_gate(dropout=0.25), torch.randn(4, 50, 32, dtype=torch.float64)
    seen = []
    operators = dict(fast_gate._computed_by(x))
    compute = operators["window_gates"]
    operators["window_gates"] = lambda *args: seen.append(args) or compute(*args)
    fast_gate._computed_by = lambda x: operators
    fast_gate.fast_gates(gate, x, None, window=5, past=None)
    fast_gate.fast_gates(gate.eval(), x, None, window=5, past=None)
    (_, _, kept, *_, in_training, _), (_, _, none, *_, in_eval, _) = seen
    assert kept.double().mean() == pytest.approx(0.75, abs=0.03)
    assert none is None
    assert (in_training, in_eval) == (0.25, 0.0)


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_cached_decoding_equals_the_full_forward(in_layers, kind, padding):
    model = CASE["GPT2LMHeadModel"].build(**FIELDS, mae_gate_window=4).double()
    ids, mask = batch(batch_size=2, length=12)
    mask = mask.flip(1) if padding else torch.ones_like(mask)
    with torch.no_grad():
        full = model(ids, attention_mask=mask, use_cache=False).logits
        cache = StaticCache(model.config, max_cache_len=14) if kind == "static" else DynamicCache()
        steps = []
        for start, end in ((0, 5), (5, 6), (6, 9), (9, 12)):
            held = {"attention_mask": mask[:, :end]}
            steps.append(model(ids[:, start:end], past_key_values=cache, **held).logits)
    real = mask.bool()
    torch.testing.assert_close(torch.cat(steps, dim=1)[real], full[real], atol=1e-5, rtol=1e-5)


def test_a_compiler_takes_it_whole(interpreted, in_layers, monkeypatch):
    monkeypatch.setattr(fast_gate, "_computed_by", lambda x: interpreted.OPERATORS)
    gate, x = make_gate().float(), torch.randn(2, 20, 32, requires_grad=True)

    def loss():
        return fast_gate.fast_gates(gate, x, None, window=5, past=None).sin().sum()

    torch.compiler.reset()
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    inputs = [x, *gate.parameters()]
    found = [torch.autograd.grad(compute(), inputs) for compute in (compiled, loss)]
    for a, e in zip(*found, strict=True):
        torch.testing.assert_close(a, e)


# --- without numbers ------------------------------------------------------------------------------


KERNELS = [name for name in vars(fast_gate_gpu) if isinstance(vars(fast_gate_gpu)[name], JITFunction)]


@pytest.mark.filterwarnings("ignore:CUDA is not available")
@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_what_runs_around_the_kernels_waits_for_no_number(dtype, padding, monkeypatch):
    """On fake tensors of a GPU, which raise where a number is asked for."""
    for name in KERNELS:
        monkeypatch.setattr(fast_gate_gpu, name, Launcher())
    monkeypatch.setattr(torch.cuda, "device_of", contextlib.nullcontext)
    fakes = {}
    stand_in = {name: SimpleNamespace(register_fake=partial(fakes.__setitem__, name)) for name in _NAMES}
    fast_gate._register_shapes(stand_in)
    with FakeTensorMode(), torch.device("cuda"):
        x, weight = torch.empty(3, 70, 32, dtype=dtype), torch.empty(5, 32, dtype=dtype)
        valid = torch.empty(3, 70, dtype=torch.bool) if padding else None
        gates = x, valid, None, weight, torch.empty(5, dtype=dtype), 70, 8, 0.0, True
        outputs = fast_gate_gpu.window_gates(*gates)
        backward = outputs[0], *outputs, valid, None, weight, 8, 0.0
        moments = fast_gate_gpu.window_moments(x, valid, 8)
        of_moments = *moments[:2], x, valid, moments[0], moments[2], 8
        for name, arguments in zip(_NAMES, (gates, backward, (x, valid, 8), of_moments), strict=True):
            found, said = fast_gate_gpu.OPERATORS[name](*arguments), fakes[name](*arguments)
            found, said = ([each] if isinstance(each, torch.Tensor) else each for each in (found, said))
            shapes = [[(t.shape, t.dtype, t.device) for t in each] for each in (found, said)]
            assert shapes[0] == shapes[1], name


_NAMES = ["window_gates", "window_gates_backward", "window_moments", "window_moments_backward"]


def test_operators_have_the_kernels_schemas():
    assert list(fast_gate_gpu.OPERATORS) == _NAMES
    for name, function in fast_gate_gpu.OPERATORS.items():
        assert torch.library.infer_schema(function, mutates_args=()) == fast_gate._SCHEMAS[name]


FITS = {"dtype": torch.bfloat16, "width": 64, "hidden": 256, "experts": 12, "window": 100}


@pytest.mark.filterwarnings("ignore:CUDA is not available")
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, True),
        ({"dtype": torch.float16}, True),
        ({"dtype": torch.float32}, False),
        ({"width": 40}, False),
        ({"hidden": 200}, False),
        ({"experts": 220}, False),
        ({"window": 1000}, False),
        ({"device": "cpu"}, False),
        ({"hook": "dense"}, False),
        ({"hook": ""}, False),
        ({"adapter": True}, False),
        ({"has_driver": False}, False),
    ],
)
def test_where_it_is_taken(change, expected, monkeypatch):
    others = {"device": "cuda", "hook": None, "adapter": False, "has_driver": True}
    settings = FITS | others | change
    monkeypatch.setattr(fast_gate, "kernels_run_on", lambda device: settings["has_driver"])
    sizes = {"num_experts": settings["experts"], "gate_hidden_size": settings["hidden"], "dropout": 0.1}
    gate = MaeGate(hidden_size=settings["width"], **sizes)
    gate.dense.to(settings["dtype"])
    if settings["hook"] is not None:
        gate.get_submodule(settings["hook"]).register_forward_hook(lambda *_: None)
    if settings["adapter"]:
        gate = FTGLayer(gate, "default", FTGConfig())
    with FakeTensorMode():
        x = torch.empty(2, 5, settings["width"], device=settings["device"])
    assert fast_gate.is_fast(gate, x, settings["window"], None) is expected
