"""Computing some of a batch's tokens: gathered, computed as rows, put back."""

from __future__ import annotations

import math
from enum import Enum
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..core.tracing import is_traced, is_transformed

# Share of open gates above which gathering costs a CPU more than it saves.
LARGEST_SHARE = 0.95
# What a CPU takes the time of, in multiply-accumulates of a product with many rows: to read the matrix,
# in rows; to find out which tokens there are; to gather those of a part and put them back.
_ROWS_TO_READ = 8
_TO_FIND = 4_000_000
_TO_GATHER = 4_000_000
# Slots by which an accelerator's padded rows grow.
_STEP = 64
# Gates that Python counts faster than an operator.
_FEW_GATES = 64


class Execution(Enum):
    """How the gated parts of a layer are computed: the same function each time."""

    GATED = "all tokens, times their gates"
    OPEN = "all tokens, where every gate is open"
    ROWS = "the tokens with open gates alone"
    OPEN_KEYS = "all tokens, and attention to a cache of open keys alone"


class GatedParts(NamedTuple):
    """Parts of a layer that are computed together.

    Attributes:
        gates: `[B, T]` or, of M parts, `[B, T, M]`; zeros and ones.
        cost: multiply-accumulates of one part for one token.
    """

    gates: Tensor
    cost: int

    def open_tokens(self) -> list[int]:
        """Number of tokens of each part."""
        gates = self.gates.flatten(0, 1)
        if gates.numel() > _FEW_GATES:
            return gates.count_nonzero(dim=0).view(-1).tolist()
        parts = [gates.tolist()] if gates.ndim == 1 else zip(*gates.tolist(), strict=True)
        return [sum(map(bool, part)) for part in parts]

    def saved(self, open_tokens: list[int]) -> int:
        """Multiply-accumulates that a CPU saves by computing these alone."""
        rows = sum(_ROWS_TO_READ + n for n in open_tokens if n)
        gathered = 0 if self._tokens() == 1 else sum(n > 0 for n in open_tokens)
        return self.most_saved() - rows * self.cost - gathered * _TO_GATHER

    def most_saved(self) -> int:
        """The same, if all gates were closed."""
        return self.cost * (_ROWS_TO_READ + self._tokens()) * math.prod(self.gates.shape[2:])

    def _tokens(self) -> int:
        return self.gates.shape[0] * self.gates.shape[1]


def choose_execution(wanted: str, *parts: GatedParts) -> Execution:
    """How to compute the parts of a layer with hard gates.

    Args:
        wanted: "sparse", "dense", or "auto": the faster one, as measured on a CPU; dense on an
            accelerator, where one would have to wait for the gates.
        parts: those that are computed together.
    """
    first = parts[0].gates
    if wanted == "dense" or is_traced(first) or is_transformed(first):
        return Execution.GATED
    if wanted == "sparse":
        return Execution.ROWS
    if first.device.type != "cpu" or sum(part.most_saved() for part in parts) < _TO_FIND:
        return Execution.GATED
    counts = [part.open_tokens() for part in parts]
    number = sum(part.gates.numel() for part in parts)
    num_open = sum(map(sum, counts))
    if num_open == number:
        return Execution.OPEN
    if num_open > LARGEST_SHARE * number:
        return Execution.GATED
    saved = sum(part.saved(open_tokens) for part, open_tokens in zip(parts, counts, strict=True))
    return Execution.ROWS if saved > _TO_FIND else Execution.GATED


def in_steps(size: int, device: torch.device) -> int:
    """A size that is taken for `size` or less: on an accelerator there are few, since cuDNN's attention
    makes a plan for each that it meets, which takes longer than to attend."""
    step = 1 if device.type == "cpu" else _STEP
    return -(-size // step) * step


class TokenRows:
    """Some of the tokens of a batch.

    Args:
        chosen: `[B, T]` bool, which of them.
        index: `[n]`, where they stand in a flattened `[B, T]`, if that is known.
    """

    def __init__(self, chosen: Tensor, index: Tensor | None = None):
        self.chosen = chosen
        self.index = chosen.flatten().nonzero().squeeze(1) if index is None else index

    @classmethod
    def all_of(cls, x: Tensor) -> TokenRows:
        """Every token of `x` `[B, T, ...]`."""
        chosen = x.new_ones(x.shape[:2], dtype=torch.bool)
        return cls(chosen, torch.arange(chosen.numel(), device=x.device))

    @classmethod
    def of_parts(cls, chosen: Tensor) -> list[TokenRows]:
        """The tokens of each of M parts, `chosen` being `[B, T, M]` bool: found at once."""
        part, index = chosen.flatten(0, 1).t().nonzero().unbind(1)
        counts = part.bincount(minlength=chosen.shape[-1]).tolist()
        return [cls(*rows) for rows in zip(chosen.unbind(-1), index.split(counts), strict=True)]

    def __len__(self) -> int:
        return self.index.shape[0]

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

    def scatter(self, rows: Tensor, fill: Tensor | None = None) -> Tensor:
        """`[1, n, ...]` -> `[B, T, ...]`; all other tokens get `fill`, or zero. (Of all tokens, it may
        be `rows` itself.)"""
        rows = rows.squeeze(0)
        if not self.is_all:
            shape = (self.chosen.numel(), *rows.shape[1:])
            full = rows.new_zeros(shape) if fill is None else fill.to(rows.dtype).expand(shape).clone()
            rows = full.index_copy_(0, self.index, rows) if len(self) else full
        return torch.unflatten(rows, 0, self.chosen.shape)

    def add_to(self, full: Tensor, rows: Tensor) -> None:
        """Add the rows `[1, n, ...]` where they belong in `full` `[B, T, ...]`, which changes."""
        flat = full.view(-1, *full.shape[2:])
        flat.index_add_(0, self.index, rows.squeeze(0).to(full.dtype))

    @property
    def is_one_sequence(self) -> bool:
        """Whether the batch is one sequence, whose rows need no padding."""
        return len(self.chosen) == 1 and len(self) > 0

    def pad(self, rows: Tensor, *, before: int = 0) -> Tensor:
        """`[1, n, ...]` -> `[B, before + most, ...]`, or longer: each sequence's rows, zeros before and
        behind. (It may be `rows` itself.)"""
        if self.is_one_sequence or self.is_all:
            if not self.is_one_sequence:
                rows = torch.unflatten(rows.squeeze(0), 0, self.chosen.shape)
            return nn.functional.pad(rows, (0, 0) * (rows.ndim - 2) + (before, 0)) if before else rows
        size = in_steps(before + self.most, rows.device)
        full = rows.new_zeros(len(self.chosen) * size, *rows.shape[2:])
        full.index_copy_(0, self._slots(size, before), rows.squeeze(0))
        return torch.unflatten(full, 0, (-1, size))

    def unpad(self, padded: Tensor) -> Tensor:
        """`[B, size, ...]` -> `[1, n, ...]`. (It may be `padded` itself.)"""
        if self.is_one_sequence and padded.shape[1] == len(self):
            return padded
        if self.is_all and padded.shape[1] == self.chosen.shape[1]:
            return padded.flatten(0, 1).unsqueeze(0)
        slots = self._slots(padded.shape[1])
        return padded.flatten(0, 1).index_select(0, slots).unsqueeze(0)
