"""The kernels for GPUs, as far as they can be tried without one: Triton's interpreter runs them on a
CPU, and tensors without numbers take a GPU's path.

Triton 3.9's interpreter computes wrongly in bfloat16 (twice a number is not its double), so bfloat16 is
compiled alone (`test_expert_kernels_compiled.py`)."""

import importlib.util
import sys

import pytest
import torch
from common import assert_same_with_gradients, hidden
from layers import attention_layer
from references import moa_attention

from hf_moa.modeling import expert_kernels, expert_linear, expert_loop, expert_products

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


@pytest.fixture(scope="module")
def interpreted():
    """The module, with kernels that are interpreted. Triton decides that when it is imported."""

    def forget():
        loaded = [name for name in sys.modules if name.split(".")[0] == "triton"]
        return {name: sys.modules.pop(name) for name in loaded if "_C" not in name}

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        kept = forget()
        spec = importlib.util.spec_from_file_location("interpreted_kernels", expert_kernels.__file__)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module
        forget()
        sys.modules.update(kept)


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


def convert(argument, dtype):
    is_real = isinstance(argument, torch.Tensor) and argument.is_floating_point()
    return argument.to(dtype) if is_real else argument


def assert_close_to_float64(function, kernels, tensors, tolerance):
    """What the kernels give is what the CPU's loop gives in float64, to a share of the largest."""
    exact = [convert(t, torch.float64) for t in tensors]
    actual, expected = getattr(kernels, function)(*tensors), getattr(expert_loop, function)(*exact)
    if isinstance(actual, torch.Tensor):
        actual, expected = [actual], [expected]
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == tensors[0].dtype
        torch.testing.assert_close(a.double(), e, rtol=0, atol=tolerance * e.abs().max().item())


@pytest.mark.parametrize("experts", [3, 256, 257])
def test_groups_are_the_loops(interpreted, experts):
    scores = torch.rand(40, experts, generator=torch.Generator().manual_seed(0))
    index = scores.topk(3).indices
    for actual, expected in zip(
        interpreted.expert_groups(index, experts), expert_loop.expert_groups(index, experts), strict=True
    ):
        assert torch.equal(actual, expected)


@sizes
@dtypes
def test_input(interpreted, size, dtype, tolerance):
    x, index, weight, bias, grad = draw(size, dtype)[0]
    groups = interpreted.expert_groups(index, len(weight))
    assert_close_to_float64("expert_input", interpreted, [x, *groups, weight, bias], tolerance)
    backward = [grad, x, *groups, weight]
    assert_close_to_float64("expert_input_backward", interpreted, backward, tolerance)
    without = interpreted.expert_input(x, *groups, weight, None)
    torch.testing.assert_close(
        without, interpreted.expert_input(x, *groups, weight, torch.zeros_like(bias))
    )


@sizes
@dtypes
def test_output(interpreted, size, dtype, tolerance):
    x, index, scale, weight, grad = draw(size, dtype)[1]
    groups = interpreted.expert_groups(index, len(weight))
    assert_close_to_float64("expert_output", interpreted, [x, *groups, scale, weight], tolerance)
    backward = [grad, x, *groups, scale, weight]
    assert_close_to_float64("expert_output_backward", interpreted, backward, tolerance)


def test_strides_do_not_matter(interpreted):
    (x, index, weight, bias, grad), _ = draw(SIZES[0], torch.float32)
    groups = interpreted.expert_groups(index, len(weight))
    strided = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in (x, weight, bias, grad)]
    assert not any(t.is_contiguous() for t in strided)
    torch.testing.assert_close(
        interpreted.expert_input(strided[0], *groups, *strided[1:3]),
        interpreted.expert_input(x, *groups, weight, bias),
    )
    for actual, expected in zip(
        interpreted.expert_input_backward(strided[3], strided[0], *groups, strided[1]),
        interpreted.expert_input_backward(grad, x, *groups, weight),
        strict=True,
    ):
        torch.testing.assert_close(actual, expected)


def in_float32(function):
    """For a layer in float64, which the kernels do not know."""

    def converting(*args):
        found = function(*(convert(arg, torch.float32) for arg in args))
        if isinstance(found, torch.Tensor):
            return convert(found, torch.float64)
        return tuple(convert(each, torch.float64) for each in found)

    return converting


@pytest.mark.parametrize("backbone", ["bert", "gpt2", "t5-decoder"])
def test_a_layer_is_the_loop_over_tokens_and_experts(interpreted, backbone, monkeypatch):
    """Through the operators and their gradients."""
    operators = {name: in_float32(function) for name, function in interpreted.OPERATORS.items()}
    monkeypatch.setattr(expert_products, "_computed_by", lambda x: operators)
    monkeypatch.setattr(expert_linear, "computes_by_expert", lambda *_: True)
    layer = attention_layer(
        backbone, attention_type="moa", num_attention_heads=2, num_attention_experts=5, head_dim=12
    )
    x, mask = hidden()
    actual, _ = layer(x, mask)
    expected = moa_attention(layer.core, layer.weights, x, mask)
    assert_same_with_gradients(actual[mask], expected[mask], [x, *layer.parameters()], atol=1e-4)


@pytest.mark.parametrize(
    ("tokens", "experts", "dtype", "by_expert"),
    [
        (16_384, 64, torch.bfloat16, True),
        (16_384, 24, torch.bfloat16, False),  # not many more than are chosen
        (32, 64, torch.bfloat16, False),  # decoding
        (16_384, 64, torch.float64, False),
    ],
)
def test_the_form_on_a_gpu(tokens, experts, dtype, by_expert):
    with torch._subclasses.FakeTensorMode():
        index = torch.empty(1, tokens, 8, dtype=torch.long, device="cuda")
        weight = torch.empty(experts, 64, 1024, dtype=dtype, device="cuda")
        assert expert_linear.computes_by_expert(index, weight) is by_expert


def test_a_gpus_path_asks_for_no_number(monkeypatch):
    """Tensors without numbers raise where one is asked for."""
    monkeypatch.setattr(expert_linear, "computes_by_expert", lambda *_: True)
    with torch.device("meta"):
        into = expert_linear.ExpertInput(num_experts=7, in_features=32, out_features=16)
        out_of = expert_linear.ExpertOutput(num_experts=7, in_features=16, out_features=32)
        x = torch.randn(2, 11, 32, requires_grad=True)
        index = torch.randint(7, (2, 11, 3))
        weight = torch.rand(2, 11, 3, requires_grad=True)
        y = out_of(into(x, index), index, weight)
        y.sum().backward()
    assert y.shape == (2, 11, 32)
    assert x.grad.shape == x.shape
    assert weight.grad.shape == weight.shape
    assert all(p.grad.shape == p.shape for p in (*into.parameters(), *out_of.parameters()))
