"""Sums over the processes of a data-parallel run, for statistics of the whole batch."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class _SumOverProcesses(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        # every process's loss depends on every process's summand
        return _SumOverProcesses.apply(gradient)


def in_process_group() -> bool:
    """Whether this is a process of a distributed run. It may be the only one: `torchrun` starts such,
    and DDP treats its model as those of several."""
    return dist.is_available() and dist.is_initialized()


def sum_over_processes(x: Tensor) -> Tensor:
    """The sum of the processes' `x`, which have one shape; `x` itself outside of a process group.

    Its gradient is that of the sum of the processes' losses. Data parallelism averages gradients over
    the processes, so parameters get the gradient of the mean of their losses.
    """
    return _SumOverProcesses.apply(x) if in_process_group() else x
