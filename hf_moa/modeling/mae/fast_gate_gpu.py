"""The operators of `fast_gate.py` on a GPU, in Triton.

A mean over a window is a product with a band of ones, which the tensor cores compute while a tile of
features is on the chip. Tokens that are not real are read as zeros. Sums are in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..core.gpu_kernels import jit, tl, triton

BLOCK = 64  # positions that a program takes at once


@jit
def _mean_of_window(
    x_at,
    valid_at,
    first,
    length,
    window,
    stride,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The means of the real tokens in the windows that end at BLOCK positions from `first` on, and how
    many they are of, at least 1. `x_at` `[1, COLUMNS]`: a sequence's first token; `valid_at`: its first
    flag, or None."""
    positions = first + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK, COLUMNS), dtype=tl.float32)
    count = tl.zeros((BLOCK,), dtype=tl.float32)
    begin = tl.maximum(first - window + 1, 0) // BLOCK * BLOCK
    for start in range(begin, tl.minimum(first + BLOCK, length), BLOCK):
        places = start + tl.arange(0, BLOCK)
        real = places < length
        if valid_at is not None:
            real = real & (tl.load(valid_at + places, mask=real, other=0) != 0)
        band = (places[None, :] <= positions[:, None]) & (places[None, :] > positions[:, None] - window)
        band = band & real[None, :]
        part = tl.load(x_at + places[:, None] * stride, mask=real[:, None], other=0.0)
        total = tl.dot(band.to(part.dtype), part, total, input_precision="ieee")
        count += tl.sum(band.to(tl.float32), 1)
    count = tl.maximum(count, 1.0)
    return total / count[:, None], count


@jit
def _window_gates(
    features,
    valid,
    kept,
    weight,
    bias,
    gates,
    active,
    counts,
    length,
    held,
    window,
    num_experts,
    dropout,
    HIDDEN: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`gates = softmax(weight tanh(mean) + bias)` at the last `length` of `held` positions, where `mean`
    is that of the real ones among the last `window` of `features` `[B, held, HIDDEN]`.

    `valid` `[B, held]`: the real ones, or None. `kept` `[B, length, HIDDEN]`: what dropout keeps behind
    tanh, or None. `active` and `counts` get what goes into `weight`, and how many tokens a mean is of,
    if they are not None. Programs: tiles of BLOCK positions, times sequences."""
    sequence = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = rows < length
    first = held - length + tl.program_id(0) * BLOCK
    feature = tl.arange(0, HIDDEN)
    valid_at = None
    if valid is not None:
        valid_at = valid + sequence * held
    features_at = features + sequence * held * HIDDEN + feature[None, :]
    mean, count = _mean_of_window(features_at, valid_at, first, held, window, HIDDEN, BLOCK, HIDDEN)
    mean = mean.to(features.dtype.element_ty).to(tl.float32)
    value = 2.0 / (1.0 + tl.exp(-2.0 * mean)) - 1.0  # tanh
    at_feature = (sequence * length + rows)[:, None] * HIDDEN + feature[None, :]
    if kept is not None:
        keeps = tl.load(kept + at_feature, mask=exists[:, None], other=0) != 0
        value = tl.where(keeps, value / (1.0 - dropout), 0.0)
    value = value.to(features.dtype.element_ty)
    if active is not None:
        tl.store(active + at_feature, value, mask=exists[:, None])
        tl.store(counts + sequence * length + rows, count, mask=exists)
    experts = tl.arange(0, EXPERTS)
    known = experts < num_experts
    matrix = tl.load(
        weight + experts[None, :] * HIDDEN + feature[:, None], mask=known[None, :], other=0.0
    )
    logits = tl.dot(value, matrix, input_precision="ieee")
    logits += tl.load(bias + experts, mask=known, other=0.0).to(tl.float32)[None, :]
    logits = tl.where(known[None, :], logits, float("-inf"))
    power = tl.exp(logits - tl.max(logits, 1)[:, None])
    tl.store(
        gates + (sequence * length + rows)[:, None] * num_experts + experts[None, :],
        power / tl.sum(power, 1)[:, None],
        mask=exists[:, None] & known[None, :],
    )


@jit
def _gates_backward(
    grad,
    gates,
    active,
    kept,
    weight,
    counts,
    grad_logits,
    grad_means,
    num_rows,
    num_experts,
    dropout,
    HIDDEN: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of `_window_gates`: the gradients of the logits, and of the means of the features, these divided
    by how many tokens they are means of. Programs: tiles of BLOCK rows."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = rows < num_rows
    experts = tl.arange(0, EXPERTS)
    known = experts < num_experts
    both = exists[:, None] & known[None, :]
    at_expert = rows[:, None] * num_experts + experts[None, :]
    gate = tl.load(gates + at_expert, mask=both, other=0.0)
    of_gate = tl.load(grad + at_expert, mask=both, other=0.0).to(tl.float32)
    of_logits = gate * (of_gate - tl.sum(gate * of_gate, 1)[:, None])
    of_logits = of_logits.to(grad_logits.dtype.element_ty)
    tl.store(grad_logits + at_expert, of_logits, mask=both)
    feature = tl.arange(0, HIDDEN)
    matrix = tl.load(
        weight + experts[:, None] * HIDDEN + feature[None, :], mask=known[:, None], other=0.0
    )
    of_value = tl.dot(of_logits, matrix, input_precision="ieee")
    at_feature = rows[:, None] * HIDDEN + feature[None, :]
    value = tl.load(active + at_feature, mask=exists[:, None], other=0.0).to(tl.float32)
    if kept is not None:
        keeps = tl.load(kept + at_feature, mask=exists[:, None], other=0) != 0
        value *= 1.0 - dropout
        of_value = tl.where(keeps, of_value / (1.0 - dropout), 0.0)
    count = tl.load(counts + rows, mask=exists, other=1.0)
    found = of_value * (1.0 - value * value) / count[:, None]
    tl.store(grad_means + at_feature, found.to(grad_means.dtype.element_ty), mask=exists[:, None])


@jit
def _spread_over_window(
    grad,
    valid,
    out,
    length,
    window,
    width,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """`out[s]`: the sum of `grad[t]` over `s <= t < s + window`; zero where s is not real. `[B, length,
    width]` both. Programs: tiles of positions, times tiles of features, which come first, times
    sequences."""
    tiles = width // COLUMNS
    sequence = tl.program_id(1).to(tl.int64)
    first = (tl.program_id(0) // tiles) * BLOCK
    feature = (tl.program_id(0) % tiles) * COLUMNS + tl.arange(0, COLUMNS)
    positions = first + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK, COLUMNS), dtype=tl.float32)
    for start in range(first, tl.minimum(first + BLOCK - 1 + window, length), BLOCK):
        places = start + tl.arange(0, BLOCK)
        band = (places[None, :] >= positions[:, None]) & (places[None, :] < positions[:, None] + window)
        part = tl.load(
            grad + (sequence * length + places)[:, None] * width + feature[None, :],
            mask=(places < length)[:, None],
            other=0.0,
        )
        total = tl.dot(band.to(part.dtype), part, total, input_precision="ieee")
    exists = positions < length
    if valid is not None:
        real = tl.load(valid + sequence * length + positions, mask=exists, other=0) != 0
        total = tl.where(real[:, None], total, 0.0)
    to = (sequence * length + positions)[:, None] * width + feature[None, :]
    tl.store(out + to, total.to(out.dtype.element_ty), mask=exists[:, None])


@jit
def _window_moments(
    x,
    valid,
    averages,
    squares,
    numbers,
    length,
    width,
    window,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Of a sequence's windowed means at its real positions: their average, the sum of the squares of
    what they differ from it (`[B, width]` both), and their number `[B]`. Programs: tiles of columns,
    times sequences."""
    sequence = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    x_at = x + sequence * length * width + columns[None, :]
    valid_at = None
    if valid is not None:
        valid_at = valid + sequence * length
    average = tl.zeros((COLUMNS,), dtype=tl.float32)
    square = tl.zeros((COLUMNS,), dtype=tl.float32)
    number = tl.sum(tl.zeros((BLOCK,), dtype=tl.float32), 0)
    for first in range(0, length, BLOCK):
        positions = first + tl.arange(0, BLOCK)
        mean, _ = _mean_of_window(x_at, valid_at, first, length, window, width, BLOCK, COLUMNS)
        counted = positions < length
        if valid is not None:
            counted = counted & (tl.load(valid_at + positions, mask=counted, other=0) != 0)
        # joined to those before it by Chan's formula: no square of a large average swallows the rest
        here = tl.sum(counted.to(tl.float32), 0)
        middle = tl.sum(tl.where(counted[:, None], mean, 0.0), 0) / tl.maximum(here, 1.0)
        away = tl.where(counted[:, None], mean - middle[None, :], 0.0)
        both = tl.maximum(number + here, 1.0)
        step = middle - average
        square += tl.sum(away * away, 0) + step * step * (number * here / both)
        average += step * (here / both)
        number += here
    tl.store(averages + sequence * width + columns, average)
    tl.store(squares + sequence * width + columns, square)
    if tl.program_id(0) == 0:
        tl.store(numbers + sequence, number)


@jit
def _moments_backward(
    grad_averages,
    grad_squares,
    x,
    valid,
    averages,
    numbers,
    out,
    length,
    width,
    window,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Of `_window_moments`: the gradients of the means, divided by how many tokens they are means of.
    Programs: tiles of positions, times tiles of columns, which come first, times sequences."""
    tiles = width // COLUMNS
    sequence = tl.program_id(1).to(tl.int64)
    first = (tl.program_id(0) // tiles) * BLOCK
    positions = first + tl.arange(0, BLOCK)
    columns = (tl.program_id(0) % tiles) * COLUMNS + tl.arange(0, COLUMNS)
    x_at = x + sequence * length * width + columns[None, :]
    counted = positions < length
    valid_at = None
    if valid is not None:
        valid_at = valid + sequence * length
        counted = counted & (tl.load(valid_at + positions, mask=counted, other=0) != 0)
    mean, count = _mean_of_window(x_at, valid_at, first, length, window, width, BLOCK, COLUMNS)
    at = sequence * width + columns
    away = mean - tl.load(averages + at)[None, :]
    of_mean = (tl.load(grad_averages + at) / tl.maximum(tl.load(numbers + sequence), 1.0))[None, :]
    of_mean = of_mean + 2.0 * tl.load(grad_squares + at)[None, :] * away
    found = tl.where(counted[:, None], of_mean / count[:, None], 0.0)
    to = (sequence * length + positions)[:, None] * width + columns[None, :]
    tl.store(out + to, found.to(out.dtype.element_ty), mask=(positions < length)[:, None])


def window_gates(
    features: Tensor,
    valid: Tensor | None,
    kept: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    length: int,
    window: int,
    dropout: float,
    for_backward: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The distributions at the last `length` positions `[B, T, E]`; and for backward what goes into the
    second matrix `[B, T, H]`, and how many tokens a mean is of `[B, T]`.

    Args:
        features: `[B, S, H]`, of which `length` are new.
        valid: `[B, S]` bool, the real ones; or None.
        kept: `[B, T, H]` bool, what dropout keeps behind tanh; or None.
        weight, bias: `[E, H]`, `[E]`.
    """
    batch, held, hidden = features.shape
    num_experts = len(weight)
    gates = features.new_empty(batch, length, num_experts, dtype=torch.float32)
    active = features.new_empty((batch, length, hidden) if for_backward else 0)
    counts = gates.new_empty((batch, length) if for_backward else 0)
    with torch.cuda.device_of(features):
        _window_gates[(triton.cdiv(length, BLOCK), batch)](
            features.contiguous(),
            _flags(valid),
            _flags(kept),
            weight.contiguous(),
            bias.contiguous(),
            gates,
            active if for_backward else None,
            counts if for_backward else None,
            length,
            held,
            window,
            num_experts,
            dropout,
            HIDDEN=hidden,
            EXPERTS=_tile(num_experts),
            BLOCK=BLOCK,
            num_warps=8,
            num_stages=2,  # with three, the features of some GPUs' kernels would not fit
        )
    return gates, active, counts


def window_gates_backward(
    grad: Tensor,
    gates: Tensor,
    active: Tensor,
    counts: Tensor,
    valid: Tensor | None,
    kept: Tensor | None,
    weight: Tensor,
    window: int,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of features, weight and bias."""
    batch, length, hidden = active.shape
    num_experts = len(weight)
    grad_logits = active.new_empty(batch * length, num_experts)
    grad_means = torch.empty_like(active)
    with torch.cuda.device_of(active):
        _gates_backward[(triton.cdiv(batch * length, BLOCK),)](
            grad.contiguous(),
            gates,
            active,
            _flags(kept),
            weight.contiguous(),
            counts,
            grad_logits,
            grad_means,
            batch * length,
            num_experts,
            dropout,
            HIDDEN=hidden,
            EXPERTS=_tile(num_experts),
            BLOCK=BLOCK,
            num_warps=8,
        )
    grad_weight = grad_logits.t() @ active.flatten(0, 1)
    return _spread(grad_means, valid, window), grad_weight, grad_logits.sum(dim=0)


def window_moments(x: Tensor, valid: Tensor | None, window: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of each sequence's windowed means at real positions: their average, the sum of the squares of what
    they differ from it (both `[B, d]`), and their number `[B]`; float32."""
    batch, length, width = x.shape
    averages = x.new_empty(batch, width, dtype=torch.float32)
    squares, numbers = torch.empty_like(averages), averages.new_empty(batch)
    columns = _columns(width)
    with torch.cuda.device_of(x):
        _window_moments[(width // columns, batch)](
            x.contiguous(),
            _flags(valid),
            averages,
            squares,
            numbers,
            length,
            width,
            window,
            BLOCK=BLOCK,
            COLUMNS=columns,
            num_warps=8,
        )
    return averages, squares, numbers


def window_moments_backward(
    grad_averages: Tensor,
    grad_squares: Tensor,
    x: Tensor,
    valid: Tensor | None,
    averages: Tensor,
    numbers: Tensor,
    window: int,
) -> Tensor:
    """The gradient of `x`."""
    batch, length, width = x.shape
    columns = _columns(width)
    x = x.contiguous()
    grad_means = torch.empty_like(x)
    with torch.cuda.device_of(x):
        _moments_backward[(triton.cdiv(length, BLOCK) * (width // columns), batch)](
            grad_averages.contiguous(),
            grad_squares.contiguous(),
            x,
            _flags(valid),
            averages,
            numbers,
            grad_means,
            length,
            width,
            window,
            BLOCK=BLOCK,
            COLUMNS=columns,
            num_warps=8,
        )
    return _spread(grad_means, valid, window)


OPERATORS: dict[str, Callable[..., Any]] = {
    "window_gates": window_gates,
    "window_gates_backward": window_gates_backward,
    "window_moments": window_moments,
    "window_moments_backward": window_moments_backward,
}


def _spread(grad: Tensor, valid: Tensor | None, window: int) -> Tensor:
    """The gradients of tokens from those of the windows that they are in."""
    batch, length, width = grad.shape
    columns = _columns(width)
    out = torch.empty_like(grad)
    with torch.cuda.device_of(grad):
        _spread_over_window[(triton.cdiv(length, BLOCK) * (width // columns), batch)](
            grad,
            _flags(valid),
            out,
            length,
            window,
            width,
            BLOCK=BLOCK,
            COLUMNS=columns,
            num_warps=4,
        )
    return out


def _flags(x: Tensor | None) -> Tensor | None:
    """Truth values as bytes, which Triton reads."""
    return None if x is None else x.contiguous().view(torch.uint8)


def _columns(width: int) -> int:
    """Features that a program takes at once: a power of 2 that divides them, which 16 does."""
    return next(columns for columns in (64, 32, 16) if width % columns == 0)


def _tile(size: int) -> int:
    """A power of 2, at least 16 for the tensor cores."""
    return max(16, triton.next_power_of_2(size))
