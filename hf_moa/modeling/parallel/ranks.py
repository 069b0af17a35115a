"""The processes that share a layer's heads, neurons or experts in tensor parallelism.

Each process (rank) has a part of the layer's matrices and computes with it on the whole batch. What all
ranks compute alike, such as the weights of all heads, then acts on a rank's part only, and its gradient
is the sum of what the ranks' parts give.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
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

    def count(self, number: int) -> int:
        """How many of the first `number` parts are the rank's."""
        return number

    def own_draws(self, training: bool) -> AbstractContextManager[None]:
        """Where a rank draws for its own parts, as dropout does in training."""
        return nullcontext()


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

    def own_experts(self, index: Tensor, number: int) -> Tensor:
        """Experts as the rank has them: numbered from the first of its `number`, which itself stands for
        an expert of another rank."""
        index = index - self._first(number)
        return index.where((index >= 0) & (index < number), number)

    def sum(self, x: Tensor) -> Tensor:
        """What each rank has a term of -> the sum, on every rank."""
        from torch.distributed.tensor import DTensor, Partial, Replicate

        terms = DTensor.from_local(x, self.mesh, [Partial()], run_check=False)
        return terms.redistribute(placements=[Replicate()]).to_local()

    def exchange(self, x: Tensor, dim: int) -> Tensor:
        """What each rank has a term of -> the rank's part along `dim` of the sum."""
        from torch.distributed.tensor import DTensor, Partial, Shard

        terms = DTensor.from_local(x, self.mesh, [Partial()], run_check=False)
        return terms.redistribute(placements=[Shard(dim)]).to_local()

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """The rank's part along `dim` -> the whole, of which each rank uses some."""
        from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

        parts = DTensor.from_local(x, self.mesh, [Shard(dim)], run_check=False)
        whole = parts.redistribute(placements=[Replicate()])
        return whole.to_local(grad_placements=[Partial()])

    def _first(self, size: int) -> int:
        return self.mesh.get_local_rank() * size

    def check(self, name: str, size: int) -> None:
        """Check that every rank has as much as every other.

        Raises:
            ValueError: the number of ranks does not divide `size`.
        """
        if size % self.number:
            raise ValueError(f"{name} must be a multiple of tp_size={self.number} (got {size}).")


class DealtRanks(TensorRanks):
    """Ranks to which parts are dealt in turn, so that each has as many of the first ones as every other,
    or one less."""

    def part(self, x: Tensor, dim: int) -> Tensor:
        first = self.mesh.get_local_rank()
        return self.shared(x)[(slice(None),) * (dim % x.ndim) + (slice(first, None, self.number),)]

    def count(self, number: int) -> int:
        return len(range(self.mesh.get_local_rank(), number, self.number))

    @contextmanager
    def own_draws(self, training: bool) -> Iterator[None]:
        """Draws whose number is each rank's own: ranks with more parts draw more. Behind them all ranks
        draw alike again, from a seed that all had in front of them."""
        if not training:
            yield
            return
        kind = self.mesh.device_type
        devices = [] if kind == "cpu" else [torch.accelerator.current_device_index()]
        with torch.random.fork_rng(devices, device_type=kind):
            before = _random_states(kind)
            yield
            drew = not all(map(torch.equal, before, _random_states(kind)))
        if drew:  # on every rank; go on elsewhere than in what was drawn
            torch.manual_seed(int(torch.randint(2**62, ())))


def _random_states(device_type: str) -> list[Tensor]:
    on_cpu = torch.get_rng_state()
    if device_type == "cpu":
        return [on_cpu]
    return [on_cpu, torch.get_device_module(device_type).get_rng_state()]
