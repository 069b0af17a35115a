"""How a layer with hard gates is computed: the fastest of several forms of one function.

The times that decide were measured on a CPU.
"""

from __future__ import annotations

import math
from enum import Enum
from typing import NamedTuple

from torch import Tensor

from ..core.tracing import is_traced, is_transformed

# Share of open gates above which gathering costs a CPU more than it saves.
LARGEST_SHARE = 0.95
# What a CPU takes the time of, in multiply-accumulates of a product with many tokens: to read the
# matrix, in tokens; to find out which tokens there are; to gather those of a part and put them back.
_TOKENS_TO_READ = 8
_TO_FIND = 4_000_000
_TO_GATHER = 4_000_000
# Gates that Python counts faster than an operator.
_FEW_GATES = 64


class Execution(Enum):
    """How the gated parts of a layer are computed: the same function each time."""

    GATED = "all tokens, times their gates"
    ALL_OPEN = "all tokens, where every gate is open"
    SUBSET = "the tokens with open gates only"
    COMPACT_KEYS = "all tokens, and attention to a compact cache"


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
        """Multiply-accumulates that a CPU saves by computing only these."""
        tokens = sum(_TOKENS_TO_READ + n for n in open_tokens if n)
        gathered = 0 if self._tokens() == 1 else sum(n > 0 for n in open_tokens)
        return self.most_saved() - tokens * self.cost - gathered * _TO_GATHER

    def most_saved(self) -> int:
        """The same, if all gates were closed."""
        return self.cost * (_TOKENS_TO_READ + self._tokens()) * math.prod(self.gates.shape[2:])

    def _tokens(self) -> int:
        return self.gates.shape[0] * self.gates.shape[1]


def choose_execution(wanted: str, *parts: GatedParts) -> Execution:
    """How to compute the parts of a layer with hard gates.

    Args:
        wanted: "sparse", "dense", or "auto": the faster one, as measured on a CPU; dense on an
            accelerator, where one would have to wait for the gates (`open_tokens.py` need not).
        parts: those that are computed together.
    """
    first = parts[0].gates
    if wanted == "dense" or is_traced(first) or is_transformed(first):
        return Execution.GATED
    if wanted == "sparse":
        return Execution.SUBSET
    if first.device.type != "cpu" or sum(part.most_saved() for part in parts) < _TO_FIND:
        return Execution.GATED
    counts = [part.open_tokens() for part in parts]
    number = sum(part.gates.numel() for part in parts)
    num_open = sum(map(sum, counts))
    if num_open == number:
        return Execution.ALL_OPEN
    if num_open > LARGEST_SHARE * number:
        return Execution.GATED
    saved = sum(part.saved(open_tokens) for part, open_tokens in zip(parts, counts, strict=True))
    return Execution.SUBSET if saved > _TO_FIND else Execution.GATED
