"""Parts of MAE whose backward keeps less than autograd's: what it leaves out is cheap to make again."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..core.linear_slices import is_plain
from ..core.precision import compute_dtype
from ..core.tracing import needs_autograd


def project_weighted(linear: nn.Module, context: Tensor, weights: Tensor) -> Tensor:
    """`linear` of weighted heads, `[B, T, h, dh]` and `[B, T or 1, h, 1]` -> `[B, T, d]`.

    Backward keeps the heads and not the weighted heads, where `linear` is nothing but its weight.
    """
    if not is_plain(linear) or needs_autograd(context):
        return linear((context * weights).flatten(-2))
    dtype = compute_dtype(linear.weight)
    weight = linear.weight.t() if isinstance(linear, Conv1D) else linear.weight
    bias = None if linear.bias is None else linear.bias.to(dtype)
    return _ProjectWeighted.apply(context.to(dtype), weights.to(dtype), weight.to(dtype), bias)


class _ProjectWeighted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, context, weights, weight, bias):
        ctx.save_for_backward(context, weights, weight)
        return nn.functional.linear((context * weights).flatten(-2), weight, bias)

    @staticmethod
    def backward(ctx, grad):
        context, weights, weight = ctx.saved_tensors
        needs_context, needs_weights, needs_weight, needs_bias = ctx.needs_input_grad
        grad_context = grad_weights = grad_weight = grad_bias = None
        vectors = grad.reshape(-1, grad.shape[-1])
        scratch = None
        if needs_weight:
            weighted = context * weights
            scratch = _reusable(weighted, grad)
            weighted = weighted.flatten(-2).flatten(0, -2)
            # in the layout of the parameter, which is Conv1D's where it is transposed here
            is_linear = weight.is_contiguous()
            grad_weight = vectors.t() @ weighted if is_linear else (weighted.t() @ vectors).t()
        if needs_bias:
            grad_bias = vectors.sum(dim=0)
        if needs_context or needs_weights:
            grad_heads = (grad @ weight).reshape(context.shape)
            if needs_weights:
                grad_weights = torch.mul(grad_heads, context, out=scratch).sum_to_size(weights.shape)
            if needs_context:
                grad_context = torch.mul(grad_heads, weights, out=_reusable(grad_heads, grad))
        return grad_context, grad_weights, grad_weight, grad_bias


def _reusable(x: Tensor, grad: Tensor) -> Tensor | None:
    """`x`, to be written over; None where a graph may hold it, or a transform has no rule for that."""
    return None if torch.is_grad_enabled() or needs_autograd(grad) else x
