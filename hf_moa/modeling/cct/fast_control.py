"""A fast form of a control network on a GPU in half precision: its logits by one kernel instead of five.

The plain form is `ControlNetwork.plain_logits`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .open_operators import are_fit, are_plain_as, may_take_kernels, open_operators

_MOST_GATES = 16


def takes_control_kernel(network: Any, x: Tensor) -> bool:
    """Whether `fast_logits` can compute a `ControlNetwork`."""
    if network.training or not may_take_kernels(network.cct_execution, x):
        return False
    if not are_fit(x, [network.dense]) or not are_plain_as(x, [network.out]):
        return False
    has_biases = network.dense.bias is not None and network.out.bias is not None
    return has_biases and network.num_gates <= _MOST_GATES


def fast_logits(network: Any, x: Tensor) -> Tensor:
    """`[..., d]` -> `[..., gates]`."""
    parameters = [
        each for linear in (network.dense, network.out) for each in (linear.weight, linear.bias)
    ]
    logits = open_operators().control_logits(x.flatten(0, -2), *parameters)
    return torch.unflatten(logits, 0, x.shape[:-1])
