"""How a module says what a call of it multiplies: its `count_macs`, which `flops.py` adds up."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Macs(NamedTuple):
    """Multiply-accumulates of one call of a module itself, not of those in it.

    Attributes:
        total: with the matrices of every expert applied to every token.
        active: of the experts that are chosen.
        skippable: what CCT holds to the budget of these and of other modules' multiply-accumulates.
    """

    total: float
    active: float
    skippable: float = 0


def macs_of_experts(weight: Tensor, index: Tensor) -> Macs:
    """Of weights `[N, a, b]` and chosen experts `[..., k]`."""
    num_experts, *matrix = weight.shape
    active = index.numel() * matrix[0] * matrix[1]
    return Macs(active // index.shape[-1] * num_experts, active)
