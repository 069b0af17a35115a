"""Computing some of a batch's tokens: gathered, computed side by side, put back."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor, nn

# Slots by which an accelerator's padded sequences grow.
_STEP = 64


def in_steps(size: int, device: torch.device) -> int:
    """A size that is taken for `size` or less: on an accelerator there are few, since cuDNN's attention
    makes a plan for each that it meets, which takes longer than to attend."""
    step = 1 if device.type == "cpu" else _STEP
    return -(-size // step) * step


class TokenSubset:
    """Some of the tokens of a batch.

    Args:
        chosen: `[B, T]` bool, which of them.
        index: `[n]`, where they stand in a flattened `[B, T]`, if that is known.
    """

    def __init__(self, chosen: Tensor, index: Tensor | None = None):
        self.chosen = chosen
        self.index = chosen.flatten().nonzero().squeeze(1) if index is None else index

    @classmethod
    def all_of(cls, x: Tensor) -> TokenSubset:
        """Every token of `x` `[B, T, ...]`."""
        chosen = x.new_ones(x.shape[:2], dtype=torch.bool)
        return cls(chosen, torch.arange(chosen.numel(), device=x.device))

    @classmethod
    def of_parts(cls, chosen: Tensor) -> list[TokenSubset]:
        """The tokens of each of M parts, `chosen` being `[B, T, M]` bool: found at once."""
        part, index = chosen.flatten(0, 1).t().nonzero().unbind(1)
        counts = part.bincount(minlength=chosen.shape[-1]).tolist()
        return [cls(*each) for each in zip(chosen.unbind(-1), index.split(counts), strict=True)]

    def __len__(self) -> int:
        return self.index.shape[0]

    @property
    def shape(self) -> torch.Size:
        """B and T, of the tokens that they are some of."""
        return self.chosen.shape

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

    @cached_property
    def is_all(self) -> bool:
        """Whether no token is left out."""
        return len(self) == self.chosen.numel()

    def gather(self, x: Tensor) -> Tensor:
        """`[B, T, ...]` -> `[1, n, ...]`. (Of all tokens, it may be `x` itself.)"""
        flat = x.flatten(0, 1)
        return (flat if self.is_all else flat.index_select(0, self.index)).unsqueeze(0)

    def scatter(self, values: Tensor, fill: Tensor | None = None) -> Tensor:
        """`[1, n, ...]` -> `[B, T, ...]`; all other tokens get `fill`, or zero. (Of all tokens, it may
        be `values` itself.)"""
        values = values.squeeze(0)
        if not self.is_all:
            shape = (self.chosen.numel(), *values.shape[1:])
            full = (
                values.new_zeros(shape) if fill is None else fill.to(values.dtype).expand(shape).clone()
            )
            values = full.index_copy_(0, self.index, values) if len(self) else full
        return torch.unflatten(values, 0, self.chosen.shape)

    def add_to(self, full: Tensor, values: Tensor) -> None:
        """Add values `[1, n, ...]` where they belong in `full` `[B, T, ...]`, which changes."""
        flat = full.view(-1, *full.shape[2:])
        flat.index_add_(0, self.index, values.squeeze(0).to(full.dtype))

    @property
    def is_one_sequence(self) -> bool:
        """Whether the batch is one sequence, which needs no padding."""
        return len(self.chosen) == 1 and len(self) > 0

    def pad(self, values: Tensor, *, before: int = 0) -> Tensor:
        """`[1, n, ...]` -> `[B, before + most, ...]`, or longer: each sequence's values, zeros before
        and behind. (It may be `values` itself.)"""
        if self.is_one_sequence or self.is_all:
            if not self.is_one_sequence:
                values = torch.unflatten(values.squeeze(0), 0, self.chosen.shape)
            return (
                nn.functional.pad(values, (0, 0) * (values.ndim - 2) + (before, 0)) if before else values
            )
        size = in_steps(before + self.most, values.device)
        full = values.new_zeros(len(self.chosen) * size, *values.shape[2:])
        full.index_copy_(0, self._slots(size, before), values.squeeze(0))
        return torch.unflatten(full, 0, (-1, size))

    def unpad(self, padded: Tensor) -> Tensor:
        """`[B, size, ...]` -> `[1, n, ...]`. (It may be `padded` itself.)"""
        if self.is_one_sequence and padded.shape[1] == len(self):
            return padded
        if self.is_all and padded.shape[1] == self.chosen.shape[1]:
            return padded.flatten(0, 1).unsqueeze(0)
        slots = self._slots(padded.shape[1])
        return padded.flatten(0, 1).index_select(0, slots).unsqueeze(0)
