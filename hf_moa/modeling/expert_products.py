"""Projections of each token's k of N experts that compute no other, as operators of PyTorch.

What computes them depends on the device: `expert_loop.py` on a CPU, `expert_kernels.py` on a GPU. To
`torch.compile` they are opaque: it takes them into its graph whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
    order, ends = torch.ops.hf_moa.expert_groups(index, len(weight))
    return torch.ops.hf_moa.expert_input(x, order, ends, weight, bias)


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
    order, ends = torch.ops.hf_moa.expert_groups(index, len(weight))
    return torch.ops.hf_moa.expert_output(x, order, ends, scale, weight)


def _computed_by(x: Tensor) -> dict[str, Callable[..., Any]]:
    if x.device.type == "cpu":
        from .expert_loop import OPERATORS
    else:
        from .expert_kernels import OPERATORS
    return OPERATORS


def _expert_groups(index: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """The rows of a flattened `index` `[n, k]`, expert by expert: their numbers `[n * k]` int64, and
    where each expert's end `[N]` int64."""
    return _computed_by(index)["expert_groups"](index, num_experts)


def _expert_input(x: Tensor, order: Tensor, ends: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return _computed_by(x)["expert_input"](x, order, ends, weight, bias)


def _expert_input_backward(
    grad: Tensor, x: Tensor, order: Tensor, ends: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return _computed_by(x)["expert_input_backward"](grad, x, order, ends, weight)


def _expert_output(x: Tensor, order: Tensor, ends: Tensor, scale: Tensor, weight: Tensor) -> Tensor:
    return _computed_by(x)["expert_output"](x, order, ends, scale, weight)


def _expert_output_backward(
    grad: Tensor, x: Tensor, order: Tensor, ends: Tensor, scale: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return _computed_by(x)["expert_output_backward"](grad, x, order, ends, scale, weight)


def _register() -> None:
    """Make the operators known to PyTorch; a second copy of this code leaves the first in place."""
    if hasattr(torch.ops.hf_moa, "expert_input"):
        return
    operators = {}
    for function in (
        _expert_groups,
        _expert_input,
        _expert_input_backward,
        _expert_output,
        _expert_output_backward,
    ):
        name = function.__name__.lstrip("_")
        operators[name] = torch.library.custom_op(
            f"hf_moa::{name}", function, mutates_args=(), device_types=("cpu", "cuda")
        )
    operators["expert_groups"].register_fake(
        lambda index, num_experts: (index.new_empty(index.numel()), index.new_empty(num_experts))
    )
    operators["expert_input"].register_fake(
        lambda x, order, ends, weight, bias: x.new_empty(
            len(x), order.numel() // len(x), weight.shape[1]
        )
    )
    operators["expert_input_backward"].register_fake(
        lambda grad, x, order, ends, weight: (
            x.new_empty(x.shape),
            weight.new_empty(weight.shape),
            weight.new_empty(weight.shape[:2]),
        )
    )
    operators["expert_output"].register_fake(
        lambda x, order, ends, scale, weight: x.new_empty(len(x), weight.shape[2])
    )
    operators["expert_output_backward"].register_fake(
        lambda grad, x, order, ends, scale, weight: (
            x.new_empty(x.shape),
            scale.new_empty(scale.shape),
            weight.new_empty(weight.shape),
        )
    )

    def save_input(ctx, inputs, output):
        x, order, ends, weight, bias = inputs
        ctx.has_bias = bias is not None
        ctx.save_for_backward(x, order, ends, weight)

    def input_backward(ctx, grad):
        grad_x, grad_weight, grad_bias = torch.ops.hf_moa.expert_input_backward(grad, *ctx.saved_tensors)
        return grad_x, None, None, grad_weight, grad_bias if ctx.has_bias else None

    def save_output(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    def output_backward(ctx, grad):
        grad_x, grad_scale, grad_weight = torch.ops.hf_moa.expert_output_backward(
            grad, *ctx.saved_tensors
        )
        return grad_x, None, None, grad_scale, grad_weight

    operators["expert_input"].register_autograd(input_backward, setup_context=save_input)
    operators["expert_output"].register_autograd(output_backward, setup_context=save_output)
    _register_flops()


def _register_flops() -> None:
    """Tell `torch.utils.flop_counter` what the operators multiply."""

    def product(order: torch.Size, weight: torch.Size) -> int:
        return 2 * order.numel() * weight[1] * weight[2]

    @register_flop_formula(torch.ops.hf_moa.expert_input)
    def _(x, order, ends, weight, bias, **kwargs) -> int:
        return product(order, weight)

    @register_flop_formula(torch.ops.hf_moa.expert_input_backward)
    def _(grad, x, order, ends, weight, **kwargs) -> int:
        return 2 * product(order, weight)

    @register_flop_formula(torch.ops.hf_moa.expert_output)
    def _(x, order, ends, scale, weight, **kwargs) -> int:
        return product(order, weight)

    @register_flop_formula(torch.ops.hf_moa.expert_output_backward)
    def _(grad, x, order, ends, scale, weight, **kwargs) -> int:
        return 2 * product(order, weight)


_register()
