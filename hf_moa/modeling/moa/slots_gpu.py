"""From the experts of a token to the slots of those it chose, and back: kernels in Triton.

`pick_slots` takes the chosen out of all, `spread_slots` puts them among zeros. Either is the derivative
of the other. PyTorch's gather and scatter do the same, but the derivative of gather adds with atomics,
and what a scatter writes has to be zero before.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.gpu_kernels import jit, tl, triton

_NUMBERS = 4096  # of a program


@jit
def _pick_rows(
    every,
    index,
    x,
    scale,
    out,
    dots,
    num_rows,
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """`out[row] = scale[row] * every[token, index[row]]`, zero where there is no such expert, and
    `dots[row] = sum x[row] * every[token, index[row]]`; `x`, `scale` and `dots` may be None.

    Programs: tiles of the rows of `index`, SLOTS to a token.
    """
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.arange(0, BLOCK_WIDTH)
    exists = rows < num_rows
    expert = tl.load(index + rows, mask=exists, other=EXPERTS)
    is_here = (expert < EXPERTS)[:, None] & (columns < WIDTH)[None, :]
    sources = (rows // SLOTS) * EXPERTS + expert  # of 64 bits, as `index` has
    part = tl.load(every + sources[:, None] * WIDTH + columns[None, :], mask=is_here, other=0.0)
    places = rows.to(tl.int64)[:, None] * WIDTH + columns[None, :]
    stores = exists[:, None] & (columns < WIDTH)[None, :]
    if scale is not None:
        numbers = part.to(tl.float32)
        factors = tl.load(x + places, mask=stores, other=0.0).to(tl.float32)
        tl.store(dots + rows, tl.sum(numbers * factors, 1).to(dots.dtype.element_ty), mask=exists)
        part = numbers * tl.load(scale + rows, mask=exists, other=0.0).to(tl.float32)[:, None]
    tl.store(out + places, part.to(out.dtype.element_ty), mask=stores)


@jit
def _spread_rows(
    x,
    index,
    scale,
    out,
    num_rows,
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """`out[token, expert] = scale[token, slot] * x[token, slot]` with `index[token, slot] = expert`,
    zero where no slot has the expert; `scale` may be None.

    Programs: tiles of the rows of `out`, `EXPERTS` to a token.
    """
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.arange(0, BLOCK_WIDTH)
    slots = tl.arange(0, BLOCK_SLOTS)
    exists = rows < num_rows
    tokens = rows // EXPERTS
    chosen = tl.load(
        index + tokens[:, None] * SLOTS + slots[None, :],
        mask=exists[:, None] & (slots < SLOTS)[None, :],
        other=EXPERTS,
    )
    is_chosen = chosen == (rows - tokens * EXPERTS)[:, None]
    slot = tl.max(tl.where(is_chosen, slots[None, :], -1), 1)
    sources = (tokens * SLOTS + slot).to(tl.int64)
    is_here = slot >= 0
    in_width = (columns < WIDTH)[None, :]
    part = tl.load(
        x + sources[:, None] * WIDTH + columns[None, :], mask=is_here[:, None] & in_width, other=0.0
    )
    if scale is not None:
        factors = tl.load(scale + sources, mask=is_here, other=0.0).to(tl.float32)
        part = part.to(tl.float32) * factors[:, None]
    tl.store(
        out + rows.to(tl.int64)[:, None] * WIDTH + columns[None, :],
        part.to(out.dtype.element_ty),
        mask=exists[:, None] & in_width,
    )


def pick_slots(every: Tensor, index: Tensor) -> Tensor:
    """`[n, N, width]`, `[n, k]` -> `[n, k, width]`; N in `index` gives zeros."""
    return _pick(every, index, None, None, None)


def pick_slots_scaled(every: Tensor, index: Tensor, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of `spread_slots`: what `pick_slots` gives, times `scale` `[n, k]`, and its products
    with `x` `[n, k, width]`, `[n, k]`."""
    dots = torch.empty_like(scale, memory_format=torch.contiguous_format)
    return _pick(every, index, x.contiguous(), scale.contiguous(), dots), dots


def _pick(
    every: Tensor, index: Tensor, x: Tensor | None, scale: Tensor | None, dots: Tensor | None
) -> Tensor:
    _, num_experts, width = every.shape
    out = every.new_empty(*index.shape, width)
    rows, columns = _slot_tile(width)
    with torch.cuda.device_of(every):
        _pick_rows[(triton.cdiv(index.numel(), rows),)](
            every.contiguous(),
            index.contiguous(),
            x,
            scale,
            out,
            dots,
            index.numel(),
            EXPERTS=num_experts,
            SLOTS=index.shape[1],
            WIDTH=width,
            BLOCK_ROWS=rows,
            BLOCK_WIDTH=columns,
            num_warps=4,
        )
    return out


def spread_slots(x: Tensor, index: Tensor, scale: Tensor | None, num_experts: int) -> Tensor:
    """`[n, k, width]`, `[n, k]`, `[n, k]` -> `[n, N, width]`; N in `index` is left out."""
    num_tokens, num_selected, width = x.shape
    out = x.new_empty(num_tokens, num_experts, width)
    rows, columns = _slot_tile(width)
    with torch.cuda.device_of(x):
        _spread_rows[(triton.cdiv(num_tokens * num_experts, rows),)](
            x.contiguous(),
            index.contiguous(),
            None if scale is None else scale.contiguous(),
            out,
            num_tokens * num_experts,
            EXPERTS=num_experts,
            SLOTS=num_selected,
            WIDTH=width,
            BLOCK_SLOTS=triton.next_power_of_2(num_selected),
            BLOCK_ROWS=rows,
            BLOCK_WIDTH=columns,
            num_warps=4,
        )
    return out


def _slot_tile(width: int) -> tuple[int, int]:
    """The rows that a program takes, of all their columns."""
    columns = triton.next_power_of_2(width)
    return max(1, _NUMBERS // columns), columns
