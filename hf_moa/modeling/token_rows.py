"""Computing some of a batch's tokens: gathered, computed as rows, put back."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor
from transformers.utils.import_utils import is_tracing

# Share of open gates above which gathering costs a CPU more than it saves.
_LARGEST_SHARE = 0.95


def skips(execution: str, *gates: Tensor) -> bool:
    """Whether to compute the parts of a layer whose hard gates are open alone, and not all.

    Args:
        execution: "sparse", "dense", or "auto": the faster one, as measured on a CPU; dense on an
            accelerator, where one would have to wait for the gates.
        gates: tensors of zeros and ones, of the parts that are computed together.
    """
    if execution == "dense" or is_tracing(gates[0]):
        return False
    if execution == "sparse":
        return True
    if gates[0].device.type != "cpu":
        return False
    number = sum(gate.numel() for gate in gates)
    return float(sum(gate.sum() for gate in gates)) <= _LARGEST_SHARE * number


class TokenRows:
    """Some of the tokens of a batch.

    Args:
        chosen: `[B, T]` bool, which of them.
    """

    def __init__(self, chosen: Tensor):
        self.chosen = chosen
        self.index = chosen.flatten().nonzero().squeeze(1)

    def __len__(self) -> int:
        return len(self.index)

    @cached_property
    def counts(self) -> Tensor:
        """`[B]`, how many of each sequence."""
        return self.chosen.sum(dim=1)

    @cached_property
    def most(self) -> int:
        """The largest of `counts`, 1 at least."""
        return max(1, int(self.counts.max()))

    @cached_property
    def positions(self) -> Tensor:
        """`[n]`, the position of each in its sequence."""
        return self.index % self.chosen.shape[1]

    @cached_property
    def places(self) -> tuple[Tensor, Tensor]:
        """`[n]` each: the sequence that each is of, and how many of it come before."""
        batch = self.index // self.chosen.shape[1]
        first = self.counts.cumsum(0) - self.counts
        return batch, torch.arange(len(self.index), device=self.index.device) - first[batch]

    def _slots(self, size: int, before: int = 0) -> Tensor:
        """`[n]`, where each stands in a flattened `[B, size]`."""
        batch, rank = self.places
        return batch * size + before + rank

    def gather(self, x: Tensor) -> Tensor:
        """`[B, T, ...]` -> `[1, n, ...]`."""
        return x.flatten(0, 1).index_select(0, self.index).unsqueeze(0)

    def scatter(self, rows: Tensor, fill: Tensor | None = None) -> Tensor:
        """`[1, n, ...]` -> `[B, T, ...]`; all other tokens get `fill`, or zero."""
        shape = (self.chosen.numel(), *rows.shape[2:])
        full = rows.new_zeros(shape) if fill is None else fill.to(rows.dtype).expand(shape).clone()
        return full.index_copy_(0, self.index, rows.squeeze(0)).unflatten(0, self.chosen.shape)

    def add_to(self, full: Tensor, rows: Tensor) -> None:
        """Add the rows `[1, n, ...]` where they belong in `full` `[B, T, ...]`, which changes."""
        flat = full.view(-1, *full.shape[2:])
        flat.index_add_(0, self.index, rows.squeeze(0).to(full.dtype))

    def pad(self, rows: Tensor, *, before: int = 0) -> Tensor:
        """`[1, n, ...]` -> `[B, before + most, ...]`: each sequence's rows, zeros before and behind."""
        size = before + self.most
        full = rows.new_zeros(len(self.chosen) * size, *rows.shape[2:])
        full.index_copy_(0, self._slots(size, before), rows.squeeze(0))
        return full.unflatten(0, (-1, size))

    def unpad(self, padded: Tensor) -> Tensor:
        """`[B, size, ...]` -> `[1, n, ...]`."""
        slots = self._slots(padded.shape[1])
        return padded.flatten(0, 1).index_select(0, slots).unsqueeze(0)
