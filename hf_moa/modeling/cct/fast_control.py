"""A fast form of a control network on a GPU in half precision: its logits by one kernel instead of five.

The plain form is `ControlNetwork.plain_logits`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.linear_slices import is_plain
from ..core.precision import compute_dtype
from .open_operators import may_take_kernels, open_operators

_MOST_GATES = 16
_SIZES_DIVIDE_BY = 16


def takes_control_kernel(network: Any, x: Tensor) -> bool:
    """Whether `fast_logits` can compute a `ControlNetwork`."""
    if network.training or not may_take_kernels(network.cct_execution, x):
        return False
    linears = (network.dense, network.out)
    if not all(is_plain(linear) and linear.bias is not None for linear in linears):
        return False
    if any(linear.weight.dtype != x.dtype or compute_dtype(x) != x.dtype for linear in linears):
        return False
    sizes = network.dense.weight.shape
    return network.num_gates <= _MOST_GATES and all(size % _SIZES_DIVIDE_BY == 0 for size in sizes)


def fast_logits(network: Any, x: Tensor) -> Tensor:
    """`[..., d]` -> `[..., gates]`."""
    parameters = [
        each for linear in (network.dense, network.out) for each in (linear.weight, linear.bias)
    ]
    logits = open_operators().control_logits(x.flatten(0, -2), *parameters)
    return torch.unflatten(logits, 0, x.shape[:-1])
