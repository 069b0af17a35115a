"""Projections of each token's k of N experts, as operators of PyTorch.

`fast_products_cpu.py` computes them on a CPU, `fast_products_gpu.py` on a GPU. They compute no expert
that was not chosen; on a GPU they may also compute all, without the plain form's detours. To
`torch.compile` they are opaque: it takes them into its graph whole. They have one derivative.

There may be one group of rows more than there are matrices: rows of others, which are zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..core.operators import define, library_name
from ..core.precision import without_autocast
from .fast_products_cpu import CPU_OPERATORS


def expert_input(
    x: Tensor,
    index: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    by_expert: bool = True,
    has_others: bool = False,
) -> Tensor:
    """`y_{t,s} = W_e x_t + b_e` with `e = index[t, s]`.

    Args:
        x: `[n, in]`, n at least 1.
        index: `[n, k]` int64.
        weight: `[N, out, in]`, in the dtype of `x`, as `bias`.
        bias: `[N, out]` or None.
        by_expert: compute only the chosen; otherwise all, on a GPU.
        has_others: N in `index` is an expert whose result is zero.

    Returns:
        `[n, k, out]`.
    """
    groups = _groups(index, len(weight) + has_others) if by_expert else []
    return operators().expert_input(x, index, groups, weight, bias)


def expert_output(
    x: Tensor,
    index: Tensor,
    scale: Tensor,
    weight: Tensor,
    *,
    by_expert: bool = True,
    has_others: bool = False,
) -> Tensor:
    """`y_t = sum_s scale_{t,s} W_e^T x_{t,s}` with `e = index[t, s]`.

    Args:
        x: `[n, k, in]`, n at least 1.
        index: `[n, k]` int64.
        scale: `[n, k]`, in the dtype of `x`.
        weight: `[N, in, out]`, in the dtype of `x`.
        by_expert, has_others: see `expert_input`.

    Returns:
        `[n, out]`.
    """
    groups = _groups(index, len(weight) + has_others) if by_expert else []
    return operators().expert_output(x, index, groups, scale, weight)


def _groups(index: Tensor, num_experts: int) -> list[Tensor]:
    """The rows of `index`, sorted by expert: see `cpu_expert_groups`."""
    return list(operators().expert_groups(index, num_experts))


def operators() -> Any:
    """PyTorch's names for the operators below."""
    return getattr(torch.ops, _LIBRARY)


def _compute(name: str, x: Tensor, *args: Any) -> Any:
    # an operator's code runs with autocast on, and what it computes in was decided before
    with without_autocast(x.device.type):
        return _computed_by(x)[name](x, *args)


def _computed_by(x: Tensor) -> dict[str, Callable[..., Any]]:
    if x.device.type == "cpu":
        return CPU_OPERATORS
    from .fast_products_gpu import OPERATORS

    return OPERATORS


# those of both devices have the same
_SCHEMAS = {
    name: torch.library.infer_schema(function, mutates_args=())
    for name, function in CPU_OPERATORS.items()
}


_LIBRARY = library_name(_SCHEMAS)


def _register() -> None:
    defined = define(_SCHEMAS, _compute)
    if defined:
        _register_shapes(defined)
        _register_gradients(defined)
        _register_flops()


def _register_shapes(defined: dict[str, Any]) -> None:
    @defined["expert_groups"].register_fake
    def _(index, num_experts):
        return index.new_empty(index.numel()), index.new_empty(num_experts)

    # `len` would make numbers of sizes that a compiled graph leaves open

    @defined["expert_input"].register_fake
    def _(x, index, groups, weight, bias):
        return x.new_empty(x.shape[0], index.shape[1], weight.shape[1])

    @defined["expert_input_backward"].register_fake
    def _(grad, x, index, groups, weight, needs_x, needs_weight, needs_bias):
        return (
            x.new_empty(x.shape if needs_x else 0),
            weight.new_empty(weight.shape if needs_weight else 0),
            weight.new_empty(weight.shape[:2] if needs_bias else 0),
        )

    @defined["expert_output"].register_fake
    def _(x, index, groups, scale, weight):
        return x.new_empty(x.shape[0], weight.shape[2])

    @defined["expert_output_backward"].register_fake
    def _(grad, x, index, groups, scale, weight, needs_x_or_scale, needs_weight):
        return (
            x.new_empty(x.shape if needs_x_or_scale else 0),
            scale.new_empty(scale.shape if needs_x_or_scale else 0),
            weight.new_empty(weight.shape if needs_weight else 0),
        )


def _register_gradients(defined: dict[str, Any]) -> None:
    def save_input(ctx, inputs, output):
        x, index, groups, weight, _ = inputs
        ctx.save_for_backward(x, index, weight, *groups)

    def input_backward(ctx, grad):
        x, index, weight, *groups = ctx.saved_tensors
        needs_x, _, _, needs_weight, needs_bias = ctx.needs_input_grad
        grad_x, grad_weight, grad_bias = operators().expert_input_backward(
            grad, x, index, groups, weight, needs_x, needs_weight, needs_bias
        )
        return (
            grad_x if needs_x else None,
            None,
            [None] * len(groups),
            grad_weight if needs_weight else None,
            grad_bias if needs_bias else None,
        )

    def save_output(ctx, inputs, output):
        x, index, groups, scale, weight = inputs
        ctx.save_for_backward(x, index, scale, weight, *groups)

    def output_backward(ctx, grad):
        x, index, scale, weight, *groups = ctx.saved_tensors
        needs_x, _, _, needs_scale, needs_weight = ctx.needs_input_grad
        grad_x, grad_scale, grad_weight = operators().expert_output_backward(
            grad, x, index, groups, scale, weight, needs_x or needs_scale, needs_weight
        )
        return (
            grad_x if needs_x else None,
            None,
            [None] * len(groups),
            grad_scale if needs_scale else None,
            grad_weight if needs_weight else None,
        )

    defined["expert_input"].register_autograd(input_backward, setup_context=save_input)
    defined["expert_output"].register_autograd(output_backward, setup_context=save_output)


def _register_flops() -> None:
    """Tell `torch.utils.flop_counter` what the operators multiply."""

    def product(index: torch.Size, groups: list[torch.Size], weight: torch.Size) -> int:
        num_tokens, num_selected = index
        return 2 * num_tokens * (num_selected if groups else weight[0]) * weight[1] * weight[2]

    @register_flop_formula(operators().expert_input)
    def _(x, index, groups, weight, bias, **kwargs) -> int:
        return product(index, groups, weight)

    @register_flop_formula(operators().expert_input_backward)
    def _(grad, x, index, groups, weight, needs_x, needs_weight, needs_bias, **kwargs) -> int:
        return (needs_x + needs_weight) * product(index, groups, weight)

    @register_flop_formula(operators().expert_output)
    def _(x, index, groups, scale, weight, **kwargs) -> int:
        return product(index, groups, weight)

    @register_flop_formula(operators().expert_output_backward)
    def _(grad, x, index, groups, scale, weight, needs_x_or_scale, needs_weight, **kwargs) -> int:
        return (needs_x_or_scale + needs_weight) * product(index, groups, weight)


_register()
