"""The kernels for GPUs, as far as they can be tried without one: Triton's interpreter runs them on a
CPU, and what runs around them takes tensors without numbers.

The interpreter cannot compute in bfloat16: that is compiled only (`test_expert_kernels_compiled.py`)."""

import contextlib
from functools import partial

import pytest
import torch
from common import assert_same_with_gradients, hidden
from layers import attention_layer
from references import moa_attention
from torch._subclasses import FakeTensorMode
from triton_tools import Launcher, convert, in_float32, interpreted_copies

from hf_moa.modeling.moa import fast_products as expert_products
from hf_moa.modeling.moa import fast_products_cpu as expert_loop
from hf_moa.modeling.moa import fast_products_gpu as expert_kernels
from hf_moa.modeling.moa import projections as expert_linear
from hf_moa.modeling.moa import slots_gpu as slot_kernels

pytest.importorskip("triton")

SIZES = [
    # tokens, chosen, experts, narrow, wide
    (33, 3, 7, 20, 40),
    (70, 2, 5, 64, 130),
    (5, 1, 3, 16, 16),
    (300, 2, 3, 9, 33),
]
sizes = pytest.mark.parametrize("size", SIZES, ids=["x".join(map(str, size)) for size in SIZES])
dtypes = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float16, 2e-3)], ids=["float32", "float16"]
)


# of the experts that were chosen, or of all
each_form = pytest.mark.parametrize("by_expert", [True, False], ids=["chosen", "all"])


@pytest.fixture(scope="module")
def interpreted():
    with interpreted_copies(slot_kernels, expert_kernels) as (slots, module):
        for name in ("pick_slots", "pick_slots_scaled", "spread_slots"):
            setattr(module, name, getattr(slots, name))
        yield module


def groups_of(index, experts, by_expert=True):
    return list(expert_kernels.expert_groups(index, experts)) if by_expert else []


def draw(size, dtype):
    """x, index, weight and gradient of an input projection; x, index, scale, weight and gradient of an
    output projection."""
    tokens, selected, experts, narrow, wide = size
    torch.manual_seed(0)
    scores = torch.rand(tokens, experts)
    scores[:, 1] = -1  # chosen by none, or by all
    index = scores.topk(selected).indices
    into = torch.randn(tokens, wide), index, torch.randn(experts, narrow, wide)
    out_of = torch.randn(tokens, selected, narrow), index, torch.rand(tokens, selected)
    out_of = *out_of, torch.randn(experts, narrow, wide), torch.randn(tokens, wide)
    into = *into, torch.randn(experts, narrow), torch.randn(tokens, selected, narrow)
    return [[convert(t, dtype) for t in tensors] for tensors in (into, out_of)]


def assert_close_to_float64(function, kernels, tensors, groups, tolerance):
    """What the kernels give is what the CPU's loop gives in float64, to a share of the largest.

    Args:
        tensors: the operator's, its empty list of groups among them if it computes all.
        groups: for the loop.
    """
    exact = [groups if isinstance(t, list) else convert(t, torch.float64) for t in tensors]
    actual, expected = (
        getattr(kernels, function)(*tensors),
        getattr(expert_loop, f"cpu_{function}")(*exact),
    )
    if isinstance(actual, torch.Tensor):
        actual, expected = [actual], [expected]
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == tensors[0].dtype
        largest = e.abs().max().item() if len(e) else 0  # a gradient that was not needed
        torch.testing.assert_close(a.double(), e, rtol=0, atol=tolerance * largest)


@pytest.mark.parametrize("experts", [3, 256, 257])
def test_groups_are_the_loops(interpreted, experts):
    scores = torch.rand(40, experts, generator=torch.Generator().manual_seed(0))
    index = scores.topk(3).indices
    for actual, expected in zip(
        interpreted.expert_groups(index, experts),
        expert_loop.cpu_expert_groups(index, experts),
        strict=True,
    ):
        assert torch.equal(actual, expected)


@sizes
@dtypes
@each_form
def test_input(interpreted, size, by_expert, dtype, tolerance):
    x, index, weight, bias, grad = draw(size, dtype)[0]
    every, groups = groups_of(index, len(weight)), groups_of(index, len(weight), by_expert)
    check = partial(assert_close_to_float64, kernels=interpreted, groups=every, tolerance=tolerance)
    check("expert_input", tensors=[x, index, groups, weight, bias])
    for needs in ((True, True, True), (True, False, False), (False, False, True)):
        check("expert_input_backward", tensors=[grad, x, index, groups, weight, *needs])
    without = interpreted.expert_input(x, index, groups, weight, None)
    torch.testing.assert_close(
        without, interpreted.expert_input(x, index, groups, weight, torch.zeros_like(bias))
    )


@sizes
@dtypes
@each_form
def test_output(interpreted, size, by_expert, dtype, tolerance):
    x, index, scale, weight, grad = draw(size, dtype)[1]
    every, groups = groups_of(index, len(weight)), groups_of(index, len(weight), by_expert)
    check = partial(assert_close_to_float64, kernels=interpreted, groups=every, tolerance=tolerance)
    check("expert_output", tensors=[x, index, groups, scale, weight])
    for needs in ((True, True), (True, False), (False, True)):
        check("expert_output_backward", tensors=[grad, x, index, groups, scale, weight, *needs])


@dtypes
@each_form
def test_rows_of_others_are_zero(interpreted, by_expert, dtype, tolerance):
    """Of experts that another process has: they are the last group, and have no matrix."""
    (x, index, weight, bias, grad), (heads, _, scale, out, grad_out) = draw(SIZES[0], dtype)
    weight, bias, out = weight[:-2], bias[:-2], out[:-2]
    index = index.clamp(max=len(weight))
    every, groups = (groups_of(index, len(weight) + 1, form) for form in (True, by_expert))
    assert every[1][-2] < index.numel()
    check = partial(assert_close_to_float64, kernels=interpreted, groups=every, tolerance=tolerance)
    check("expert_input", tensors=[x, index, groups, weight, bias])
    check("expert_output", tensors=[heads, index, groups, scale, out])
    check("expert_input_backward", tensors=[grad, x, index, groups, weight, True, True, True])
    check("expert_output_backward", tensors=[grad_out, heads, index, groups, scale, out, True, True])


@pytest.mark.parametrize("name", ["expert_input", "expert_output"])
@each_form
def test_strides_do_not_matter(interpreted, by_expert, name):
    is_input = name == "expert_input"
    x, index, *others, grad = draw(SIZES[0], torch.float32)[0 if is_input else 1]
    groups = groups_of(index, SIZES[0][2], by_expert)
    forward, backward = interpreted.OPERATORS[name], interpreted.OPERATORS[f"{name}_backward"]

    def compute(x, others, grad):
        kept, needs = (others[:1], (True,) * 3) if is_input else (others, (True,) * 2)
        yield forward(x, index, groups, *others)
        yield from backward(grad, x, index, groups, *kept, *needs)

    # another layout; and a gradient that is one number, expanded, as that of a sum is
    other_x, *other_others = (t.transpose(0, 1).contiguous().transpose(0, 1) for t in (x, *others))
    assert not any(t.is_contiguous() for t in (other_x, *other_others))
    one = torch.ones(()).expand_as(grad)
    actual = compute(other_x, other_others, one)
    for found, expected in zip(actual, compute(x, others, one.contiguous()), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("backbone", ["bert", "gpt2", "t5-decoder"])
@each_form
def test_a_layer_is_the_loop_over_tokens_and_experts(interpreted, backbone, by_expert, monkeypatch):
    """Through the operators and their gradients."""
    monkeypatch.setattr(expert_linear, "computes_all_by_operator", lambda *_: True)
    operators = {name: in_float32(function) for name, function in interpreted.OPERATORS.items()}
    monkeypatch.setattr(expert_products, "_computed_by", lambda x: operators)
    sizes = {"num_attention_heads": 2, "num_attention_experts": 5, "head_dim": 12}
    execution = "sparse" if by_expert else "auto"
    layer = attention_layer(backbone, attention_type="moa", moa_execution=execution, **sizes)
    x, mask = hidden()
    actual, _ = layer(x, mask)
    expected = moa_attention(layer.core, layer.weights, x, mask)
    assert_same_with_gradients(actual[mask], expected[mask], [x, *layer.parameters()], atol=1e-4)


@pytest.mark.parametrize(
    ("tokens", "experts", "dtype", "by_expert", "of_outputs"),
    [
        (16_384, 128, torch.bfloat16, True, True),
        (16_384, 64, torch.bfloat16, True, False),
        (16_384, 40, torch.bfloat16, False, False),  # not many more than are chosen
        (32, 128, torch.bfloat16, False, False),  # decoding
        (16_384, 32, torch.float32, True, True),
        (16_384, 16, torch.float32, False, False),
        (16_384, 64, torch.float64, False, False),
    ],
)
def test_the_form_on_a_gpu(tokens, experts, dtype, by_expert, of_outputs, monkeypatch):
    monkeypatch.setattr(expert_linear, "kernels_run_on", lambda device: True)
    with FakeTensorMode():
        index = torch.empty(1, tokens, 8, dtype=torch.long, device="cuda")
        weight = torch.empty(experts, 64, 1024, dtype=dtype, device="cuda")
        assert expert_linear.computes_by_expert(index, weight) is by_expert
        assert expert_linear.computes_by_expert(index, weight, adds_up=True) is of_outputs


@pytest.mark.parametrize(
    ("tokens", "dtype", "execution", "by_operator"),
    [
        (16_384, torch.bfloat16, "auto", True),
        (16_384, torch.float32, "auto", True),
        (16_384, torch.float64, "auto", False),
        (64, torch.bfloat16, "auto", False),  # decoding
        (16_384, torch.bfloat16, "dense", False),  # the plain form
    ],
)
def test_the_dense_form_on_a_gpu(tokens, dtype, execution, by_operator, monkeypatch):
    monkeypatch.setattr(expert_linear, "kernels_run_on", lambda device: True)
    with FakeTensorMode():
        index = torch.empty(1, tokens, 8, dtype=torch.long, device="cuda")
        for shape in ((16, 64, 1024), (16, 1024, 64)):
            weight = torch.empty(shape, dtype=dtype, device="cuda")
            found = expert_linear.computes_all_by_operator(index, weight, execution)
            assert found is by_operator


@pytest.fixture
def matmul():
    """The settings of a GPU's products, which are put back."""
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    yield settings
    settings.fp32_precision = before


@pytest.mark.parametrize(("precision", "by_expert"), [("ieee", True), ("tf32", False)])
def test_tf32_is_like_half_precision(precision, by_expert, matmul, monkeypatch):
    monkeypatch.setattr(expert_linear, "kernels_run_on", lambda device: True)
    matmul.fp32_precision = precision
    with FakeTensorMode():
        index = torch.empty(1, 16_384, 8, dtype=torch.long, device="cuda")
        weight = torch.empty(32, 64, 1024, device="cuda")
        assert expert_linear.computes_by_expert(index, weight) is by_expert


def test_the_precision_of_products_is_a_constant_to_a_compiler():
    def function(x):
        return x + 1 if expert_linear.multiplies_on_tensor_cores(torch.float32) else x - 1

    assert torch.compile(function, fullgraph=True, backend="eager")(torch.zeros(())) == -1


def test_a_gpu_that_triton_has_no_driver_for_computes_all():
    """Here there is none. The answer is a constant to a compiler."""
    device = torch.device("cuda", 0)
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")

    def function(x):
        return x + 1 if expert_linear.kernels_run_on(device) else x - 1

    assert function(torch.zeros(())) == -1
    assert torch.compile(function, fullgraph=True, backend="eager")(torch.zeros(())) == -1


@contextlib.contextmanager
def autocast_of_a_gpu(enabled, dtype):
    """`torch.autocast("cuda")`, which stays off where there is no GPU."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    try:
        torch.set_autocast_enabled("cuda", enabled)
        torch.set_autocast_dtype("cuda", dtype)
        yield
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])


@pytest.mark.filterwarnings("ignore:CUDA is not available")
@pytest.mark.parametrize("autocasts", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@each_form
def test_what_runs_around_the_kernels_waits_for_no_number(by_expert, dtype, autocasts, monkeypatch):
    """On fake tensors of a GPU, which raise where a number is asked for. Autocast must not change what
    the operators return: it sums in float32."""
    monkeypatch.setattr(expert_kernels, "_multiply_rows", Launcher())
    monkeypatch.setattr(expert_kernels, "_multiply_experts", Launcher())
    monkeypatch.setattr(slot_kernels, "_pick_rows", Launcher())
    monkeypatch.setattr(slot_kernels, "_spread_rows", Launcher())
    monkeypatch.setattr(torch.cuda, "device_of", contextlib.nullcontext)
    compute = expert_products._compute
    tokens, selected, experts, narrow, wide = 40, 3, 7, 16, 32
    with FakeTensorMode(), torch.device("cuda"), autocast_of_a_gpu(autocasts, dtype):
        index = torch.empty(tokens, selected, dtype=torch.long)
        shapes = {"x": (tokens, wide), "heads": (tokens, selected, narrow), "scale": (tokens, selected)}
        shapes |= {"into": (experts, narrow, wide), "bias": (experts, narrow), "y": (tokens, wide)}
        named = {name: torch.empty(shape, dtype=dtype) for name, shape in shapes.items()}
        x, heads, scale, into, bias, y = named.values()
        order, ends = compute("expert_groups", index, experts)
        assert order.dtype == ends.dtype == torch.long
        groups = [order, ends] if by_expert else []
        found = [
            compute("expert_input", x, index, groups, into, bias),
            *compute("expert_input_backward", heads, x, index, groups, into, True, True, True),
            compute("expert_output", heads, index, groups, scale, into),
            *compute("expert_output_backward", y, heads, index, groups, scale, into, True, True),
        ]
    expected = [heads, x, into, bias, y, heads, scale, into]
    assert [(t.shape, t.dtype) for t in found] == [(t.shape, t.dtype) for t in expected]


@each_form
def test_operators_have_shapes_without_numbers(by_expert, monkeypatch):
    monkeypatch.setattr(expert_linear, "computes_by_expert", lambda *_, **__: by_expert)
    monkeypatch.setattr(expert_linear, "computes_all_by_operator", lambda *_: True)
    with torch.device("meta"):
        into = expert_linear.ExpertInput(num_experts=7, in_features=32, out_features=16)
        out_of = expert_linear.ExpertOutput(num_experts=7, in_features=16, out_features=32)
        x = torch.randn(2, 11, 32, requires_grad=True)
        index = torch.randint(7, (2, 11, 3))
        weight = torch.rand(2, 11, 3, requires_grad=True)
        y = out_of(into(x, index), index, weight)
        y.sum().backward()
    assert y.shape == x.grad.shape == (2, 11, 32)
    assert weight.grad.shape == weight.shape
    assert all(p.grad.shape == p.shape for p in (*into.parameters(), *out_of.parameters()))


def test_operators_of_both_devices_have_the_same_schemas():
    found = {
        name: torch.library.infer_schema(function, mutates_args=())
        for name, function in expert_kernels.OPERATORS.items()
    }
    assert found == expert_products._SCHEMAS
