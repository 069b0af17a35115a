"""The operators of `fast_products.py` on a GPU, in Triton.

Without groups they multiply by all experts' matrices at once, which PyTorch does best, and pick the
chosen (`slots_gpu.py`). What they spread for that is not kept for the backward pass, but spread again.

With groups only the chosen are multiplied. `_multiply_rows` multiplies each row by the matrix of its
expert: it gathers a tile of an expert's rows, wherever they lie, and writes the products where they
belong. `_multiply_experts` sums the outer products of an expert's rows, for the gradient of its matrix.
Both read from the device which rows are whose, so the host waits for nothing: it starts as many programs
as the worst division of the rows could need, and those that find no rows return.

Sums over a token's k experts go through a buffer `[tokens * k, d]`: to add in place would take atomic
additions in float32, which move twice the bytes and give another result each time.

Accumulation is in float32; float32 is multiplied as `torch.backends.cuda.matmul.fp32_precision` says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..core.gpu_kernels import jit, tl, triton
from .slots_gpu import pick_slots, pick_slots_scaled, spread_slots


class _Tiles(NamedTuple):
    """What a program takes at once, at most: rows and columns of a product, and of what is summed over;
    and the warps that share it, where rows are multiplied by matrices. The fastest of those that were
    tried on an H100."""

    rows: int
    columns: int
    summed: int
    warps: int


_LARGEST_TILES = {
    torch.float16: _Tiles(rows=128, columns=128, summed=64, warps=4),
    torch.bfloat16: _Tiles(rows=128, columns=128, summed=64, warps=4),
    torch.float32: _Tiles(rows=64, columns=64, summed=16, warps=2),
}


@jit
def _multiply_rows(
    x,
    order,
    ends,
    weight,
    scale,
    bias,
    out,
    num_rows,
    num_experts,
    width_in,
    width_out,
    stride_expert,
    stride_in,
    stride_out,
    SLOTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
):
    """`out[row] = scale[row] * x[row] @ weight[expert] + bias[expert]`; `scale` and `bias` may be None.

    `x` is `[num_rows / SLOTS, width_in]`: as many of the rows share one of its.
    Programs: the worst case of row tiles, times tiles of `out`'s columns, which come first.
    """
    tiles_out = tl.cdiv(width_out, BLOCK_OUT)
    tile = tl.program_id(0) // tiles_out
    columns_out = (tl.program_id(0) % tiles_out) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)

    # whose rows these are: each expert's are cut into tiles, in the order of the experts
    experts = tl.arange(0, EXPERTS)
    end = tl.load(ends + experts, mask=experts < num_experts, other=num_rows)
    start = tl.load(ends + experts - 1, mask=(experts > 0) & (experts < num_experts), other=0)
    start = tl.where(experts < num_experts, start, num_rows)
    tiles = (end - start + BLOCK_ROWS - 1) // BLOCK_ROWS
    last_tile = tl.cumsum(tiles, 0)
    expert = tl.sum((last_tile <= tile).to(tl.int64))
    if expert >= num_experts:
        return
    is_mine = experts == expert
    first = tl.sum(tl.where(is_mine, start + (tile - last_tile + tiles) * BLOCK_ROWS, 0))
    stop = tl.sum(tl.where(is_mine, end, 0))

    positions = first + tl.arange(0, BLOCK_ROWS)
    exists = positions < stop
    rows = tl.load(order + positions, mask=exists, other=0)
    sources = rows // SLOTS
    exists_out = columns_out < width_out
    total = tl.zeros((BLOCK_ROWS, BLOCK_OUT), dtype=tl.float32)
    for first_in in range(0, width_in, BLOCK_IN):
        columns_in = first_in + tl.arange(0, BLOCK_IN)
        exists_in = columns_in < width_in
        part = tl.load(
            x + sources[:, None] * width_in + columns_in[None, :],
            mask=exists[:, None] & exists_in[None, :],
            other=0.0,
        )
        matrix = tl.load(
            weight
            + expert * stride_expert
            + columns_in[:, None] * stride_in
            + columns_out[None, :] * stride_out,
            mask=exists_in[:, None] & exists_out[None, :],
            other=0.0,
        )
        total = tl.dot(part, matrix, total, input_precision=PRECISION)
    if scale is not None:
        total *= tl.load(scale + rows, mask=exists, other=0.0).to(tl.float32)[:, None]
    if bias is not None:
        added = tl.load(bias + expert * width_out + columns_out, mask=exists_out, other=0.0)
        total += added.to(tl.float32)[None, :]
    tl.store(
        out + rows[:, None] * width_out + columns_out[None, :],
        total.to(out.dtype.element_ty),
        mask=exists[:, None] & exists_out[None, :],
    )


@jit
def _multiply_experts(
    a,
    b,
    order,
    ends,
    scale,
    out,
    sums,
    width_a,
    width_b,
    SLOTS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """`out[expert] = sum scale[row] * a[row] b[token]^T` over the rows of an expert, and `sums[expert]`
    the sum of their `a[row]`; `scale` and `sums` may be None.

    Programs: experts, times tiles of `out`'s rows, times tiles of its columns.
    """
    expert = tl.program_id(0).to(tl.int64)
    columns_a = tl.program_id(1) * BLOCK_A + tl.arange(0, BLOCK_A)
    columns_b = tl.program_id(2) * BLOCK_B + tl.arange(0, BLOCK_B)
    exists_a, exists_b = columns_a < width_a, columns_b < width_b
    start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    stop = tl.load(ends + expert)
    total = tl.zeros((BLOCK_A, BLOCK_B), dtype=tl.float32)
    sum_a = tl.zeros((BLOCK_A,), dtype=tl.float32)
    for first in range(start, stop, BLOCK_ROWS):
        positions = first + tl.arange(0, BLOCK_ROWS)
        exists = positions < stop
        rows = tl.load(order + positions, mask=exists, other=0)
        tokens = rows // SLOTS
        part_a = tl.load(
            a + rows[:, None] * width_a + columns_a[None, :],
            mask=exists[:, None] & exists_a[None, :],
            other=0.0,
        )
        part_b = tl.load(
            b + tokens[:, None] * width_b + columns_b[None, :],
            mask=exists[:, None] & exists_b[None, :],
            other=0.0,
        )
        if sums is not None:
            if tl.program_id(2) == 0:
                sum_a += tl.sum(part_a.to(tl.float32), 0)
        if scale is not None:
            part_scale = tl.load(scale + rows, mask=exists, other=0.0).to(tl.float32)
            part_a = (part_a.to(tl.float32) * part_scale[:, None]).to(part_b.dtype)
        total = tl.dot(tl.trans(part_a), part_b, total, input_precision=PRECISION)
    tl.store(
        out + expert * width_a * width_b + columns_a[:, None] * width_b + columns_b[None, :],
        total.to(out.dtype.element_ty),
        mask=exists_a[:, None] & exists_b[None, :],
    )
    if sums is not None:
        if tl.program_id(2) == 0:
            tl.store(sums + expert * width_a + columns_a, sum_a.to(sums.dtype.element_ty), mask=exists_a)


def expert_groups(index: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    # few bits are sorted in few passes
    dtype = torch.uint8 if num_experts <= 2**8 else torch.int16 if num_experts <= 2**15 else torch.int64
    flat = index.flatten().to(dtype)
    ordered, order = flat.sort(stable=True)
    experts = torch.arange(num_experts, device=index.device, dtype=ordered.dtype)
    return order, torch.searchsorted(ordered, experts, right=True)


def expert_input(
    x: Tensor, index: Tensor, groups: list[Tensor], weight: Tensor, bias: Tensor | None
) -> Tensor:
    if not groups:
        every = nn.functional.linear(x, weight.flatten(0, 1), None if bias is None else bias.flatten())
        return pick_slots(every.view(len(x), *weight.shape[:2]), index)
    order, ends = groups
    y = _row_products(x, order, ends, weight.transpose(1, 2), bias=bias)
    return y.view(len(x), -1, weight.shape[1])


def expert_input_backward(
    grad: Tensor,
    x: Tensor,
    index: Tensor,
    groups: list[Tensor],
    weight: Tensor,
    needs_x: bool,
    needs_weight: bool,
    needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_x, grad_weight = x.new_empty(0), weight.new_empty(0)
    if not groups:
        every = spread_slots(grad, index, None, len(weight)).flatten(1)
        if needs_x:
            grad_x = every @ weight.flatten(0, 1)
        if needs_weight:
            grad_weight = (every.t() @ x).view(weight.shape)
        grad_bias = every.sum(dim=0).view(weight.shape[:2]) if needs_bias else weight.new_empty(0)
        return grad_x, grad_weight, grad_bias
    order, ends = groups
    grad = grad.reshape(index.numel(), -1).contiguous()
    grad_bias = weight.new_empty(weight.shape[:2] if needs_bias else 0)
    if needs_x:
        grad_x = _row_products(grad, order, ends, weight).view(len(x), -1, x.shape[1]).sum(dim=1)
    if needs_weight or needs_bias:
        sums = grad_bias if needs_bias else None
        products = _expert_products(grad, x, order, ends, num_experts=len(weight), sums=sums)
        grad_weight = products if needs_weight else grad_weight
    return grad_x, grad_weight, grad_bias


def expert_output(
    x: Tensor, index: Tensor, groups: list[Tensor], scale: Tensor, weight: Tensor
) -> Tensor:
    if not groups:
        return spread_slots(x, index, scale, len(weight)).flatten(1) @ weight.flatten(0, 1)
    order, ends = groups
    y = _row_products(x.flatten(0, 1), order, ends, weight, scale=scale)
    return y.view(len(x), -1, weight.shape[2]).sum(dim=1)


def expert_output_backward(
    grad: Tensor,
    x: Tensor,
    index: Tensor,
    groups: list[Tensor],
    scale: Tensor,
    weight: Tensor,
    needs_x_or_scale: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_x, grad_scale, grad_weight = x.new_empty(0), scale.new_empty(0), weight.new_empty(0)
    if not groups:
        if needs_x_or_scale:
            every = (grad @ weight.flatten(0, 1).t()).view(len(x), *weight.shape[:2])
            grad_x, grad_scale = pick_slots_scaled(every, index, x, scale)
        if needs_weight:
            spread = spread_slots(x, index, scale, len(weight)).flatten(1)
            grad_weight = (spread.t() @ grad).view(weight.shape)
        return grad_x, grad_scale, grad_weight
    order, ends = groups
    grad = grad.contiguous()
    if needs_x_or_scale:
        product = _row_products(grad, order, ends, weight.transpose(1, 2)).view(x.shape)
        grad_scale = (product * x).sum(dim=-1)
        grad_x = product * scale.unsqueeze(-1)
    if needs_weight:
        grad_weight = _expert_products(
            x.flatten(0, 1), grad, order, ends, num_experts=len(weight), scale=scale
        )
    return grad_x, grad_scale, grad_weight


OPERATORS: dict[str, Callable[..., Any]] = {
    "expert_groups": expert_groups,
    "expert_input": expert_input,
    "expert_input_backward": expert_input_backward,
    "expert_output": expert_output,
    "expert_output_backward": expert_output_backward,
}


def _row_products(
    x: Tensor,
    order: Tensor,
    ends: Tensor,
    weight: Tensor,
    *,
    scale: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Each row times its expert's matrix: `x` `[n or n * k, in]`, `weight` `[N, in, out]` of any strides
    -> `[n * k, out]`."""
    num_rows, (num_experts, width_in, width_out) = len(order), weight.shape
    # rows of no expert are not written
    out = (x.new_zeros if len(ends) > num_experts else x.new_empty)(num_rows, width_out)
    most = _LARGEST_TILES[x.dtype]
    rows, part_out = _tile(num_rows / num_experts, most.rows), _tile(width_out, most.columns)
    worst = min(triton.cdiv(num_rows, rows) + num_experts, num_rows)
    with torch.cuda.device_of(x):
        _multiply_rows[(worst * triton.cdiv(width_out, part_out),)](
            x.contiguous(),
            order,
            ends,
            weight,
            scale if scale is None else scale.contiguous(),
            bias if bias is None else bias.contiguous(),
            out,
            num_rows,
            num_experts,
            width_in,
            width_out,
            *weight.stride(),
            SLOTS=num_rows // len(x),
            EXPERTS=triton.next_power_of_2(num_experts),
            PRECISION=_precision(),
            BLOCK_ROWS=rows,
            BLOCK_IN=_tile(width_in, most.summed),
            BLOCK_OUT=part_out,
            num_warps=most.warps,
        )
    return out


def _expert_products(
    a: Tensor,
    b: Tensor,
    order: Tensor,
    ends: Tensor,
    *,
    num_experts: int,
    scale: Tensor | None = None,
    sums: Tensor | None = None,
) -> Tensor:
    """The sum of the outer products of each expert's rows: `a` `[n * k, in]`, `b` `[n, out]`
    -> `[N, in, out]`. The sums of its rows of `a` are written to `sums` `[N, in]`."""
    width_a, width_b = a.shape[1], b.shape[1]
    out = a.new_empty(num_experts, width_a, width_b)
    most = _LARGEST_TILES[a.dtype]
    part_a, part_b = _tile(width_a, min(64, most.rows)), _tile(width_b, most.columns)
    with torch.cuda.device_of(a):
        _multiply_experts[(num_experts, triton.cdiv(width_a, part_a), triton.cdiv(width_b, part_b))](
            a.contiguous(),
            b.contiguous(),
            order,
            ends,
            scale if scale is None else scale.contiguous(),
            out,
            sums,
            width_a,
            width_b,
            SLOTS=len(order) // len(b),
            PRECISION=_precision(),
            BLOCK_ROWS=_tile(len(order) / num_experts, most.summed),
            BLOCK_A=part_a,
            BLOCK_B=part_b,
            num_warps=4,
        )
    return out


def _tile(size: float, most: int) -> int:
    """How much of a dimension a program takes: a power of 2, at least 16 for the tensor cores."""
    return min(most, max(16, triton.next_power_of_2(int(size))))


def _precision() -> str:
    allowed = torch.backends.cuda.matmul.fp32_precision == "tf32" and torch.version.hip is None
    return "tf32" if allowed else "ieee"
