"""The operators of `fast_choice.py`, in Triton. A program has all logits of some tokens.

The softmax is computed again for the derivative, which is less to move than to keep.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..core.gpu_kernels import jit, tl, triton

_LOGITS = 2048  # of a program


@jit
def _probabilities(logits, rows, experts, exists, num_experts):
    """The softmax of the tile's logits, with zeros beyond the experts."""
    is_expert = experts[None, :] < num_experts
    tile = tl.load(
        logits + rows[:, None] * num_experts + experts[None, :],
        mask=exists[:, None] & is_expert,
        other=0.0,
    )
    tile = tl.where(is_expert, tile, -float("inf"))
    tile = tl.exp(tile - tl.max(tile, 1)[:, None])
    return tile / tl.sum(tile, 1)[:, None]


@jit
def _choose(
    logits,
    weight,
    index,
    num_rows,
    num_experts,
    SLOTS: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    experts = tl.arange(0, BLOCK_EXPERTS)
    slots = tl.arange(0, BLOCK_SLOTS)
    exists = rows < num_rows
    left = _probabilities(logits, rows, experts, exists, num_experts)
    whole = tl.sum(left, 1)  # of a token that is no number neither
    left = tl.where(experts[None, :] < num_experts, left, -1.0)
    top = tl.zeros((BLOCK_ROWS, BLOCK_SLOTS), dtype=tl.float32)
    chosen = tl.zeros((BLOCK_ROWS, BLOCK_SLOTS), dtype=tl.int64)
    for slot in range(SLOTS):
        best = tl.max(left, 1)
        # of equal ones the first; where there is no best one, as of NaN, the last
        place = tl.min(tl.where(left == best[:, None], experts[None, :], num_experts - 1), 1)
        is_slot = slots[None, :] == slot
        top = tl.where(is_slot, best[:, None], top)
        chosen = tl.where(is_slot, place[:, None], chosen)
        left = tl.where(experts[None, :] == place[:, None], -1.0, left)
    places = rows[:, None] * SLOTS + slots[None, :]
    stores = exists[:, None] & (slots < SLOTS)[None, :]
    top = tl.where((whole == whole)[:, None], top / tl.sum(top, 1)[:, None], float("nan"))
    tl.store(weight + places, top, mask=stores)
    tl.store(index + places, chosen, mask=stores)


@jit
def _choose_backward(
    grad,
    logits,
    index,
    out,
    num_rows,
    num_experts,
    DETACHED: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
):
    """With p the softmax, G the chosen, S their sum and g the gradient of their weights: if the
    normaliser is detached p (g / S - sum_G p g / S), otherwise p / S (g - sum_G p / S g) in G."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    experts = tl.arange(0, BLOCK_EXPERTS)
    exists = rows < num_rows
    p = _probabilities(logits, rows, experts, exists, num_experts)
    slope = tl.zeros((BLOCK_ROWS, BLOCK_EXPERTS), dtype=tl.float32)
    kept = tl.zeros((BLOCK_ROWS, BLOCK_EXPERTS), dtype=tl.float32)
    for slot in range(SLOTS):
        expert = tl.load(index + rows * SLOTS + slot, mask=exists, other=0)
        is_here = experts[None, :] == expert[:, None]
        part = tl.load(grad + rows * SLOTS + slot, mask=exists, other=0.0)
        slope += tl.where(is_here, part[:, None], 0.0)
        kept += tl.where(is_here, p, 0.0)
    weight = kept / tl.sum(kept, 1)[:, None]
    mean = tl.sum(weight * slope, 1)[:, None]
    if DETACHED:
        found = (p * slope) / tl.sum(kept, 1)[:, None] - p * mean
    else:
        found = weight * (slope - mean)
    tl.store(
        out + rows[:, None] * num_experts + experts[None, :],
        found,
        mask=exists[:, None] & (experts < num_experts)[None, :],
    )


def choose_experts(logits: Tensor, num_selected: int, detached: bool) -> tuple[Tensor, Tensor]:
    shape = len(logits), num_selected
    weight, index = logits.new_empty(shape), logits.new_empty(shape, dtype=torch.int64)
    with torch.cuda.device_of(logits):
        _choose[(_programs(logits),)](
            logits.contiguous(),
            weight,
            index,
            len(logits),
            logits.shape[1],
            SLOTS=num_selected,
            BLOCK_SLOTS=triton.next_power_of_2(num_selected),
            **_tile_of_logits(logits),
            num_warps=4,
        )
    return weight, index


def choose_experts_backward(grad: Tensor, logits: Tensor, index: Tensor, detached: bool) -> Tensor:
    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    with torch.cuda.device_of(logits):
        _choose_backward[(_programs(logits),)](
            grad.contiguous(),
            logits.contiguous(),
            index,
            out,
            len(logits),
            logits.shape[1],
            DETACHED=detached,
            SLOTS=index.shape[1],
            **_tile_of_logits(logits),
            num_warps=4,
        )
    return out


OPERATORS: dict[str, Callable[..., Any]] = {
    "choose_experts": choose_experts,
    "choose_experts_backward": choose_experts_backward,
}


def _tile_of_logits(logits: Tensor) -> dict[str, int]:
    experts = triton.next_power_of_2(logits.shape[1])
    return {"BLOCK_ROWS": max(1, _LOGITS // experts), "BLOCK_EXPERTS": experts}


def _programs(logits: Tensor) -> int:
    return triton.cdiv(len(logits), _tile_of_logits(logits)["BLOCK_ROWS"])
