"""The operators of `fast_products.py` on a CPU, expert by expert.

The rows of an expert are gathered, multiplied, and added where they belong, while they are in the
cache; backward gathers them again. No buffer of `[tokens * k, d]` is ever built: on a CPU, one costs
about as much as two of the projections.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

# Rows that are worked on at once: with a matrix of an expert, they fit into a core's cache.
_ROWS = 512


def cpu_expert_groups(index: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """The rows of a flattened `index` `[n, k]`, expert by expert: their numbers `[n * k]` int64, and
    where each expert's end `[N]` int64."""
    flat = index.reshape(-1)
    return flat.argsort(stable=True), flat.bincount(minlength=num_experts).cumsum(0)


class _Parts:
    """The rows of an order, expert by expert and at most `_ROWS` at once.

    Iterating gives an expert's number, rows of it, and their tokens. `scratch` is memory that all of
    them use in turn: new memory costs a CPU more than the arithmetic does.
    """

    def __init__(self, order: Tensor, ends: Tensor, num_tokens: int):
        self._order = order
        self._tokens = order // (len(order) // num_tokens)
        self._ends = ends.tolist()
        self._most = int(ends.diff(prepend=ends.new_zeros(1)).max())

    def __iter__(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        start = 0
        for expert, end in enumerate(self._ends):
            for first in range(start, end, _ROWS):
                last = min(first + _ROWS, end)
                yield expert, self._order[first:last], self._tokens[first:last]
            start = end

    def scratch(self, like: Tensor, width: int) -> Tensor:
        """`[rows, width]`, for the most rows that come at once."""
        return like.new_empty(min(_ROWS, self._most), width)


def _sums(like: Tensor, *shape: int) -> Tensor:
    """Zeros to add to: half precision would round each addition."""
    return like.new_zeros(shape, dtype=torch.promote_types(like.dtype, torch.float32))


def _new_rows(ends: Tensor, weight: Tensor) -> Callable[..., Tensor]:
    """Makes rows to write to, of a tensor and a shape: zeros, where not all of them have a matrix."""
    return Tensor.new_empty if len(ends) == len(weight) else Tensor.new_zeros


def _rows(x: Tensor, rows: Tensor, scratch: Tensor) -> Tensor:
    return torch.index_select(x, 0, rows, out=scratch[: len(rows)])


def _product(a: Tensor, b: Tensor, scratch: Tensor) -> Tensor:
    return torch.mm(a, b, out=scratch[: len(a)])


def cpu_expert_input(
    x: Tensor, index: Tensor, groups: list[Tensor], weight: Tensor, bias: Tensor | None
) -> Tensor:
    order, ends = groups
    y = _new_rows(ends, weight)(x, (len(order), weight.shape[1]))
    parts = _Parts(order, ends[: len(weight)], len(x))
    gathered, projected = parts.scratch(x, x.shape[1]), parts.scratch(x, weight.shape[1])
    for expert, rows, tokens in parts:
        part = _product(_rows(x, tokens, gathered), weight[expert].t(), projected)
        y.index_copy_(0, rows, part if bias is None else part.add_(bias[expert]))
    return y.view(len(x), -1, weight.shape[1])


def cpu_expert_input_backward(
    grad: Tensor,
    x: Tensor,
    index: Tensor,
    groups: list[Tensor],
    weight: Tensor,
    needs_x: bool,
    needs_weight: bool,
    needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `x`, `weight` and `bias`; one that is not needed is empty."""
    order, ends = groups
    grad = grad.reshape(len(order), -1)
    grad_x = _sums(x, *x.shape) if needs_x else x.new_empty(0)
    grad_weight = weight.new_zeros(weight.shape) if needs_weight else weight.new_empty(0)
    grad_bias = _sums(weight, *weight.shape[:2]) if needs_bias else weight.new_empty(0)
    parts = _Parts(order, ends[: len(weight)], len(x))
    gathered, projected = parts.scratch(x, x.shape[1]), parts.scratch(x, weight.shape[1])
    for expert, rows, tokens in parts:
        part = _rows(grad, rows, projected)
        if needs_weight:
            grad_weight[expert].addmm_(part.t(), _rows(x, tokens, gathered))
        if needs_x:
            grad_x.index_add_(0, tokens, _product(part, weight[expert], gathered).to(grad_x.dtype))
        if needs_bias:
            grad_bias[expert] += part.sum(dim=0)
    return grad_x.to(x.dtype), grad_weight, grad_bias.to(weight.dtype)


def cpu_expert_output(
    x: Tensor, index: Tensor, groups: list[Tensor], scale: Tensor, weight: Tensor
) -> Tensor:
    order, ends = groups
    y = _sums(x, len(x), weight.shape[2])
    rows_of_x, scale = x.reshape(len(order), -1), scale.reshape(-1, 1)
    parts = _Parts(order, ends[: len(weight)], len(x))
    gathered, projected = parts.scratch(x, weight.shape[1]), parts.scratch(x, weight.shape[2])
    for expert, rows, tokens in parts:
        part = _rows(rows_of_x, rows, gathered).mul_(scale.index_select(0, rows))
        y.index_add_(0, tokens, _product(part, weight[expert], projected).to(y.dtype))
    return y.to(x.dtype)


def cpu_expert_output_backward(
    grad: Tensor,
    x: Tensor,
    index: Tensor,
    groups: list[Tensor],
    scale: Tensor,
    weight: Tensor,
    needs_x_or_scale: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `x`, `scale` and `weight`; one that is not needed is empty."""
    order, ends = groups
    rows_of_x, rows_of_scale = x.reshape(len(order), -1), scale.reshape(-1, 1)
    new = _new_rows(ends, weight)
    grad_x = new(x, rows_of_x.shape if needs_x_or_scale else (0,))
    grad_scale = new(scale, rows_of_scale.shape if needs_x_or_scale else (0,))
    grad_weight = weight.new_zeros(weight.shape) if needs_weight else weight.new_empty(0)
    parts = _Parts(order, ends[: len(weight)], len(x))
    gathered, projected = parts.scratch(x, weight.shape[1]), parts.scratch(x, weight.shape[1])
    wide = parts.scratch(x, weight.shape[2])
    for expert, rows, tokens in parts:
        part_scale = rows_of_scale.index_select(0, rows)
        part, grad_part = _rows(rows_of_x, rows, gathered), _rows(grad, tokens, wide)
        if needs_x_or_scale:
            product = _product(grad_part, weight[expert].t(), projected)
            grad_scale.index_copy_(0, rows, (product * part).sum(dim=1, keepdim=True))
            grad_x.index_copy_(0, rows, product.mul_(part_scale))
        if needs_weight:
            grad_weight[expert].addmm_(part.mul_(part_scale).t(), grad_part)
    if needs_x_or_scale:
        grad_x, grad_scale = grad_x.view(x.shape), grad_scale.view(scale.shape)
    return grad_x, grad_scale, grad_weight


CPU_OPERATORS: dict[str, Callable[..., Any]] = {
    "expert_groups": cpu_expert_groups,
    "expert_input": cpu_expert_input,
    "expert_input_backward": cpu_expert_input_backward,
    "expert_output": cpu_expert_output,
    "expert_output_backward": cpu_expert_output_backward,
}
