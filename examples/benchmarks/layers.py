"""Making layers and models run for a benchmark."""

from collections.abc import Callable

import torch
from torch import nn


def forward(module: nn.Module, *inputs, **kwargs) -> Callable[[], object]:
    """Inference of `module`, in eval mode."""
    module.eval()

    def run():
        with torch.no_grad():
            return module(*inputs, **kwargs)

    return run


def forward_and_backward(module: nn.Module, x: torch.Tensor, **kwargs) -> Callable[[], None]:
    """A training step of `module` without the optimiser: gradients of all parameters and of `x`."""
    module.train()
    x = x.clone().requires_grad_(True)
    gradient = torch.randn_like(x)
    learning = [x, *module.parameters()]

    def run():
        output = module(x, **kwargs)
        (output if torch.is_tensor(output) else output[0]).backward(gradient)
        for tensor in learning:
            tensor.grad = None

    return run


def step(module: nn.Module, x: torch.Tensor, *, training: bool, **kwargs) -> Callable[[], object]:
    return forward_and_backward(module, x, **kwargs) if training else forward(module, x, **kwargs)
