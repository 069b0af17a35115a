"""The processes that share a layer's heads, neurons or experts in tensor parallelism.

Each process (rank) has a part of the layer's matrices and computes with it on the whole batch. What all
ranks compute alike, such as the weights of all heads, then acts on a rank's part only, and its gradient
is the sum of what the ranks' parts give.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


class Ranks:
    """Only one rank, which has everything: how every layer starts.

    Attributes:
        number: of ranks.
    """

    number = 1

    def shared(self, x: Tensor) -> Tensor:
        """`x`, the same on all ranks, where it acts on a rank's part only."""
        return x

    def part(self, x: Tensor, dim: int) -> Tensor:
        """The rank's part of `x`, which is the same on all ranks and has all parts along `dim`."""
        return x

    def slices(self, gates: Tensor) -> Tensor:
        """Gates `[..., M]` of slices side by side -> those of the rank's neurons, in slices of one size,
        which may be smaller."""
        return gates

    def own_experts(self, index: Tensor, weight: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
        """The chosen experts `[..., k]` and their weights as the rank has them: numbered from its first
        one, and with a weight of 0 for an expert of another rank, in whose place stands the first."""
        return index, weight


ONE_RANK = Ranks()


class TensorRanks(Ranks):
    """The ranks of a mesh.

    Args:
        mesh: of one dimension, a `torch.distributed.DeviceMesh`.
    """

    def __init__(self, mesh: Any):
        self.mesh = mesh
        self.number = mesh.size()

    def shared(self, x: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor, Partial, Replicate

        if not (torch.is_grad_enabled() and x.requires_grad):
            return x
        every = DTensor.from_local(x, self.mesh, [Replicate()], run_check=False)
        return every.to_local(grad_placements=[Partial()])

    def part(self, x: Tensor, dim: int) -> Tensor:
        size = x.shape[dim] // self.number
        return self.shared(x).narrow(dim, self._first(size), size)

    def slices(self, gates: Tensor) -> Tensor:
        finer = self.number // math.gcd(self.number, gates.shape[-1])
        return self.part(gates.repeat_interleave(finer, dim=-1), -1)

    def own_experts(self, index: Tensor, weight: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
        size = num_experts // self.number
        index = index - self._first(size)
        is_own = (index >= 0) & (index < size)
        return index.where(is_own, 0), self.shared(weight).where(is_own, 0)

    def _first(self, size: int) -> int:
        return self.mesh.get_local_rank() * size

    def check(self, name: str, size: int) -> None:
        """Check that every rank has as much as every other.

        Raises:
            ValueError: the number of ranks does not divide `size`.
        """
        if size % self.number:
            raise ValueError(f"{name} must be a multiple of tp_size={self.number} (got {size}).")
