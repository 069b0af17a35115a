"""The operator of `open_operators.py` for control networks on a GPU, in Triton: one for both layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..core.gpu_kernels import jit, tl, triton

_GATES = 16  # columns of the tensor cores' smallest product; networks have fewer gates


@jit
def _control(
    x,
    weight,
    bias,
    out_weight,
    out_bias,
    logits,
    num_rows,
    width,
    hidden,
    num_gates,
    ROWS: tl.constexpr,
    HIDDEN: tl.constexpr,
    SUMMED: tl.constexpr,
    GATES: tl.constexpr,
):
    """`logits = relu(x weight^T + bias) out_weight^T + out_bias`, `[n, num_gates]`: `x` `[n, width]`,
    `weight` `[hidden, width]`, `out_weight` `[num_gates, hidden]`. Programs: tiles of tokens."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = rows < num_rows
    inner, columns, gates = tl.arange(0, SUMMED), tl.arange(0, HIDDEN), tl.arange(0, GATES)
    is_gate = gates < num_gates
    x_at = x + tl.where(exists, rows, 0).to(tl.int64)[:, None] * width + inner[None, :]
    found = tl.zeros((ROWS, GATES), dtype=tl.float32)
    for first in range(0, hidden, HIDDEN):
        total = tl.zeros((ROWS, HIDDEN), dtype=tl.float32)
        weight_at = weight + (first + columns)[None, :] * width + inner[:, None]
        for start in range(0, width, SUMMED):
            total = tl.dot(
                tl.load(x_at + start), tl.load(weight_at + start), total, input_precision="ieee"
            )
        total = tl.maximum(total + tl.load(bias + first + columns).to(tl.float32)[None, :], 0.0)
        out_at = out_weight + gates[None, :] * hidden + (first + columns)[:, None]
        matrix = tl.load(out_at, mask=is_gate[None, :], other=0.0)
        found = tl.dot(total.to(matrix.dtype), matrix, found, input_precision="ieee")
    found += tl.load(out_bias + gates, mask=is_gate, other=0.0).to(tl.float32)[None, :]
    at = logits + rows.to(tl.int64)[:, None] * num_gates + gates[None, :]
    tl.store(at, found.to(logits.dtype.element_ty), mask=exists[:, None] & is_gate[None, :])


def control_logits(
    x: Tensor, weight: Tensor, bias: Tensor, out_weight: Tensor, out_bias: Tensor
) -> Tensor:
    """`W2 relu(W1 x + b1) + b2` of `x` `[n, d]`: `[n, gates]`.

    Args:
        weight, bias: W1 `[hidden, d]` and b1; 16 divides both sizes.
        out_weight, out_bias: W2 `[gates, hidden]` and b2, of at most 16 gates.
    """
    (number, width), (gates, hidden) = x.shape, out_weight.shape
    logits = x.new_empty(number, gates)
    tiles = _control_tiles(number, width, hidden)
    with torch.cuda.device_of(x):
        _control[(triton.cdiv(number, tiles["ROWS"]),)](
            x.contiguous(),
            weight.contiguous(),
            bias,
            out_weight.contiguous(),
            out_bias,
            logits,
            number,
            width,
            hidden,
            gates,
            **tiles,
        )
    return logits


def _control_tiles(number: int, width: int, hidden: int) -> dict[str, int]:
    """Few tokens in each tile, as long as that makes more tiles than a GPU computes at once."""
    return {
        "ROWS": 16 if number <= 2048 else 64,
        "HIDDEN": min(hidden & -hidden, 128),
        "SUMMED": min(width & -width, 64),
        "GATES": _GATES,
        "num_warps": 4,
        "num_stages": 4,
    }


CONTROL_OPERATORS: dict[str, Callable[..., Any]] = {"control_logits": control_logits}
