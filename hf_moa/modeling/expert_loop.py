"""Expert by expert: projections of each token's k of N experts that compute no other.

The rows of an expert are gathered, multiplied, and added where they belong, while they are in the
cache; backward gathers them again. No buffer of `[tokens * k, d]` is ever built: on a CPU, one costs
about as much as two of the projections.

The operators are opaque to `torch.compile`, which takes them into its graph whole.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula


def expert_input(x: Tensor, index: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`y_{t,s} = W_e x_t + b_e` with `e = index[t, s]`.

    Args:
        x: `[n, in]`.
        index: `[n, k]` int64.
        weight: `[N, out, in]`.
        bias: `[N, out]` or None.

    Returns:
        `[n, k, out]`.
    """
    return torch.ops.hf_moa.expert_input(x, index, weight, bias)


def expert_output(x: Tensor, index: Tensor, scale: Tensor, weight: Tensor) -> Tensor:
    """`y_t = sum_s scale_{t,s} W_e^T x_{t,s}` with `e = index[t, s]`.

    Args:
        x: `[n, k, in]`.
        index: `[n, k]` int64.
        scale: `[n, k]`, in the dtype of `x`.
        weight: `[N, in, out]`.

    Returns:
        `[n, out]`.
    """
    return torch.ops.hf_moa.expert_output(x, index, scale, weight)


# Rows that are worked on at once: with a matrix of an expert, they fit into a core's cache.
_ROWS = 512


class _Groups:
    """The rows of a flattened `index` `[n, k]`, expert by expert and at most `_ROWS` at once.

    Iterating gives an expert's number, rows of it, and their tokens. `scratch` is memory that all of
    them use in turn: new memory costs a CPU more than the arithmetic does.
    """

    def __init__(self, index: Tensor, num_experts: int):
        flat = index.reshape(-1).numpy()
        # 16 bits are sorted by radix, ten times as fast as `Tensor.argsort`
        self._order = torch.from_numpy(
            np.argsort(flat.astype(np.uint16 if num_experts < 2**16 else np.int64), kind="stable")
        )
        self._tokens = self._order // index.shape[1]
        self._counts = np.bincount(flat, minlength=num_experts).tolist()

    def __iter__(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        start = 0
        for expert, count in enumerate(self._counts):
            for first in range(start, start + count, _ROWS):
                last = min(first + _ROWS, start + count)
                yield expert, self._order[first:last], self._tokens[first:last]
            start += count

    def scratch(self, like: Tensor, width: int) -> Tensor:
        """`[rows, width]`, for the most rows that come at once."""
        return like.new_empty(min(_ROWS, max(self._counts)), width)


def _sums(like: Tensor, *shape: int) -> Tensor:
    """Zeros to add to: half precision would round each addition."""
    return like.new_zeros(shape, dtype=torch.promote_types(like.dtype, torch.float32))


def _rows(x: Tensor, rows: Tensor, scratch: Tensor) -> Tensor:
    return torch.index_select(x, 0, rows, out=scratch[: len(rows)])


def _product(a: Tensor, b: Tensor, scratch: Tensor) -> Tensor:
    return torch.mm(a, b, out=scratch[: len(a)])


def _expert_input(x: Tensor, index: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = x.new_empty(index.numel(), weight.shape[1])
    groups = _Groups(index, len(weight))
    gathered, projected = groups.scratch(x, x.shape[1]), groups.scratch(x, weight.shape[1])
    for expert, rows, tokens in groups:
        part = _product(_rows(x, tokens, gathered), weight[expert].t(), projected)
        y.index_copy_(0, rows, part if bias is None else part.add_(bias[expert]))
    return y.view(*index.shape, weight.shape[1])


def _expert_input_backward(
    grad: Tensor, x: Tensor, index: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    grad = grad.reshape(index.numel(), -1)
    grad_x = _sums(x, *x.shape)
    grad_weight = weight.new_zeros(weight.shape)
    grad_bias = _sums(weight, *weight.shape[:2])
    groups = _Groups(index, len(weight))
    gathered, projected = groups.scratch(x, x.shape[1]), groups.scratch(x, weight.shape[1])
    for expert, rows, tokens in groups:
        part = _rows(grad, rows, projected)
        grad_weight[expert].addmm_(part.t(), _rows(x, tokens, gathered))
        grad_x.index_add_(0, tokens, _product(part, weight[expert], gathered).to(grad_x.dtype))
        grad_bias[expert] += part.sum(dim=0)
    return grad_x.to(x.dtype), grad_weight, grad_bias.to(weight.dtype)


def _expert_output(x: Tensor, index: Tensor, scale: Tensor, weight: Tensor) -> Tensor:
    y = _sums(x, len(index), weight.shape[2])
    rows_of_x, scale = x.reshape(index.numel(), -1), scale.reshape(-1, 1)
    groups = _Groups(index, len(weight))
    gathered, projected = groups.scratch(x, weight.shape[1]), groups.scratch(x, weight.shape[2])
    for expert, rows, tokens in groups:
        part = _rows(rows_of_x, rows, gathered).mul_(scale.index_select(0, rows))
        y.index_add_(0, tokens, _product(part, weight[expert], projected).to(y.dtype))
    return y.to(x.dtype)


def _expert_output_backward(
    grad: Tensor, x: Tensor, index: Tensor, scale: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    rows_of_x, scale = x.reshape(index.numel(), -1), scale.reshape(-1, 1)
    grad_x = rows_of_x.new_empty(rows_of_x.shape)
    grad_scale = scale.new_empty(scale.shape)
    grad_weight = weight.new_zeros(weight.shape)
    groups = _Groups(index, len(weight))
    gathered, projected = groups.scratch(x, weight.shape[1]), groups.scratch(x, weight.shape[1])
    wide = groups.scratch(x, weight.shape[2])
    for expert, rows, tokens in groups:
        part_scale = scale.index_select(0, rows)
        part, grad_part = _rows(rows_of_x, rows, gathered), _rows(grad, tokens, wide)
        product = _product(grad_part, weight[expert].t(), projected)
        grad_scale.index_copy_(0, rows, (product * part).sum(dim=1, keepdim=True))
        grad_weight[expert].addmm_(part.mul_(part_scale).t(), grad_part)
        grad_x.index_copy_(0, rows, product.mul_(part_scale))
    return grad_x.view(x.shape), grad_scale.view(index.shape), grad_weight


def _register() -> None:
    """Make the operators known to PyTorch; a second copy of this code leaves the first in place."""
    if hasattr(torch.ops.hf_moa, "expert_input"):
        return
    operators = {}
    for function in (
        _expert_input,
        _expert_input_backward,
        _expert_output,
        _expert_output_backward,
    ):
        name = function.__name__.lstrip("_")
        operators[name] = torch.library.custom_op(
            f"hf_moa::{name}", function, mutates_args=(), device_types="cpu"
        )
    operators["expert_input"].register_fake(
        lambda x, index, weight, bias: x.new_empty(*index.shape, weight.shape[1])
    )
    operators["expert_input_backward"].register_fake(
        lambda grad, x, index, weight: (
            x.new_empty(x.shape),
            weight.new_empty(weight.shape),
            weight.new_empty(weight.shape[:2]),
        )
    )
    operators["expert_output"].register_fake(
        lambda x, index, scale, weight: x.new_empty(len(index), weight.shape[2])
    )
    operators["expert_output_backward"].register_fake(
        lambda grad, x, index, scale, weight: (
            x.new_empty(x.shape),
            scale.new_empty(scale.shape),
            weight.new_empty(weight.shape),
        )
    )

    def save_input(ctx, inputs, output):
        x, index, weight, bias = inputs
        ctx.has_bias = bias is not None
        ctx.save_for_backward(x, index, weight)

    def input_backward(ctx, grad):
        x, index, weight = ctx.saved_tensors
        grad_x, grad_weight, grad_bias = torch.ops.hf_moa.expert_input_backward(grad, x, index, weight)
        return grad_x, None, grad_weight, grad_bias if ctx.has_bias else None

    def save_output(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    def output_backward(ctx, grad):
        grad_x, grad_scale, grad_weight = torch.ops.hf_moa.expert_output_backward(
            grad, *ctx.saved_tensors
        )
        return grad_x, None, grad_scale, grad_weight

    operators["expert_input"].register_autograd(input_backward, setup_context=save_input)
    operators["expert_output"].register_autograd(output_backward, setup_context=save_output)
    _register_flops()


def _register_flops() -> None:
    """Tell `torch.utils.flop_counter` what the operators multiply."""

    def product(index: torch.Size, weight: torch.Size) -> int:
        return 2 * index.numel() * weight[1] * weight[2]

    @register_flop_formula(torch.ops.hf_moa.expert_input)
    def _(x, index, weight, bias, **kwargs) -> int:
        return product(index, weight)

    @register_flop_formula(torch.ops.hf_moa.expert_input_backward)
    def _(grad, x, index, weight, **kwargs) -> int:
        return 2 * product(index, weight)

    @register_flop_formula(torch.ops.hf_moa.expert_output)
    def _(x, index, scale, weight, **kwargs) -> int:
        return product(index, weight)

    @register_flop_formula(torch.ops.hf_moa.expert_output_backward)
    def _(grad, x, index, scale, weight, **kwargs) -> int:
        return 2 * product(index, weight)


_register()
