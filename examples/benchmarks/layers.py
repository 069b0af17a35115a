"""Making layers and models run for a benchmark."""

from collections.abc import Callable

import torch
from torch import nn

from hf_moa.timing import compiled as compiled_module


def forward(module: nn.Module, *inputs, compiled: bool = False, **kwargs) -> Callable[[], object]:
    """Inference of `module`, in eval mode."""
    module.eval()
    call = _compiled(module) if compiled else module

    def run():
        with torch.no_grad():
            return call(*inputs, **kwargs)

    return run


def forward_and_backward(
    module: nn.Module, x: torch.Tensor, *, compiled: bool = False, **kwargs
) -> Callable[[], None]:
    """A training step of `module` without the optimiser: gradients of all parameters and of `x`."""
    module.train()
    call = _compiled(module) if compiled else module
    x = x.clone().requires_grad_(True)
    gradient = torch.randn_like(x)
    learning = [x, *module.parameters()]

    def run():
        output = call(x, **kwargs)
        (output if torch.is_tensor(output) else output[0]).backward(gradient)
        for tensor in learning:
            tensor.grad = None

    return run


def step(module: nn.Module, x: torch.Tensor, *, training: bool, **kwargs) -> Callable[[], object]:
    return forward_and_backward(module, x, **kwargs) if training else forward(module, x, **kwargs)


def _compiled(module: nn.Module) -> Callable:
    """`module` by torch.compile, as one graph."""
    torch._dynamo.reset()  # forgets other tables' modules: it compiles a class eight times at most
    return compiled_module(module, fullgraph=True, dynamic=False)
