"""Products of MAE with a backward of their own: the same as autograd's, and less kept."""

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from transformers.pytorch_utils import Conv1D

from hf_moa.modeling.mae.fast_products import project_weighted

HEADS, SIZE, WIDE = 3, 4, 5


def linear_layers():
    torch.manual_seed(0)
    layers = {
        "Linear": nn.Linear(HEADS * SIZE, WIDE),
        "Linear without a bias": nn.Linear(HEADS * SIZE, WIDE, bias=False),
        "Conv1D": Conv1D(WIDE, HEADS * SIZE),
    }
    return {name: layer.double() for name, layer in layers.items()}


def inputs(length):
    torch.manual_seed(1)
    context = torch.randn(2, 6, HEADS, SIZE, dtype=torch.float64, requires_grad=True)
    return context, torch.rand(2, length, HEADS, 1, dtype=torch.float64, requires_grad=True)


def saved_bytes(function):
    sizes = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = function()
    assert kept.requires_grad
    return sum(size for size, _ in sizes.values())


@pytest.mark.parametrize("length", [1, 6], ids=["by sequence", "by position"])
@pytest.mark.parametrize("name", linear_layers())
def test_projection_of_weighted_heads(name, length):
    linear = linear_layers()[name]
    context, weights = inputs(length)
    function = lambda context, weights, *_: project_weighted(linear, context, weights)  # noqa: E731
    torch.testing.assert_close(
        function(context, weights), linear((context * weights).flatten(-2)), rtol=0, atol=1e-12
    )
    differentiable = (context, weights, *linear.parameters())
    assert gradcheck(function, differentiable)
    assert gradgradcheck(function, differentiable)


@pytest.mark.parametrize("frozen", ["context", "weights", "linear"])
def test_projection_computes_the_gradients_that_are_asked_for(frozen):
    linear = linear_layers()["Linear"]
    context, weights = inputs(6)
    held = {"context": [context], "weights": [weights], "linear": list(linear.parameters())}
    for tensor in held.pop(frozen):
        tensor.requires_grad_(False)
    wanted = [tensor for tensors in held.values() for tensor in tensors]
    actual = torch.autograd.grad(project_weighted(linear, context, weights).square().sum(), wanted)
    expected = linear((context * weights).flatten(-2)).square().sum()
    torch.testing.assert_close(actual, torch.autograd.grad(expected, wanted))


def test_projection_keeps_the_heads_once():
    linear = nn.Linear(64, 64)
    context, weights = torch.randn(8, 16, 4, 16, requires_grad=True), torch.rand(8, 16, 4, 1)
    lean = saved_bytes(lambda: project_weighted(linear, context, weights))
    plain = saved_bytes(lambda: linear((context * weights).flatten(-2)))
    parameters_and_weights = linear.weight.nbytes + weights.nbytes
    assert lean == context.nbytes + parameters_and_weights
    # without a gradient to the weights, autograd keeps only the weighted heads
    assert plain == lean
    weights.requires_grad_()
    assert saved_bytes(lambda: project_weighted(linear, context, weights)) == lean
    assert saved_bytes(lambda: linear((context * weights).flatten(-2))) == lean + context.nbytes


def test_hooks_and_adapters_of_the_projection_are_called():
    linear = linear_layers()["Linear"]
    context, weights = inputs(6)
    expected = project_weighted(linear, context, weights)
    linear.register_forward_hook(lambda module, args, output: 2 * output)
    torch.testing.assert_close(project_weighted(linear, context, weights), 2 * expected)


def test_projection_under_autocast():
    linear = linear_layers()["Linear"].float()
    context, weights = (tensor.detach().float().requires_grad_() for tensor in inputs(6))
    with torch.autocast("cpu", torch.bfloat16):
        y = project_weighted(linear, context, weights)
        expected = linear((context * weights).flatten(-2))
    assert y.dtype == expected.dtype == torch.bfloat16
    wanted = (context, weights, *linear.parameters())
    got, want = (torch.autograd.grad(each.float().sum(), wanted) for each in (y, expected))
    assert [g.dtype for g in got] == [torch.float32] * 4
    torch.testing.assert_close(got, want, rtol=0.02, atol=0.05)


def test_transforms_take_the_plain_form():
    linear = linear_layers()["Linear"]
    context, weights = inputs(6)
    tangent = torch.ones_like(context)
    actual = torch.func.jvp(lambda c: project_weighted(linear, c, weights), (context,), (tangent,))
    expected = torch.func.jvp(lambda c: linear((c * weights).flatten(-2)), (context,), (tangent,))
    torch.testing.assert_close(actual, expected)
    y = project_weighted(linear, context, weights)
    grads = torch.randn(3, *y.shape, dtype=torch.float64)
    wanted = (context, weights, *linear.parameters())
    batched = torch.autograd.grad(y, wanted, grads, retain_graph=True, is_grads_batched=True)
    for i, grad in enumerate(grads):
        one = torch.autograd.grad(y, wanted, grad, retain_graph=True)
        torch.testing.assert_close([each[i] for each in batched], list(one))


@pytest.mark.slow
def test_compiles_to_one_graph():
    linear = linear_layers()["Conv1D"]
    context, weights = inputs(6)

    def function(context, weights):
        return project_weighted(linear, context, weights)

    wanted = (context, weights, *linear.parameters())
    grads = [
        torch.autograd.grad(run(context, weights).square().sum(), wanted)
        for run in (function, torch.compile(function, fullgraph=True))
    ]
    torch.testing.assert_close(grads[1], grads[0])
