"""A router's choice on a GPU: the best k of N experts and their weights, in one kernel instead of five.

The plain form is `TopKRouter.select`; `fast_choice_gpu.py` has the kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..core.operators import define, kernels_run_on, library_name
from ..core.tracing import is_drawn_as_graph, is_transformed

_MOST_ROUTED = 1024  # experts: a program holds all of a token's


def chooses_by_kernel(logits: Tensor) -> bool:
    """Whether `choose_experts` takes these logits `[..., N]`."""
    return (
        logits.device.type == "cuda"
        and logits.dtype == torch.float32
        and logits.shape[-1] <= _MOST_ROUTED
        and not (is_drawn_as_graph() or is_transformed(logits))
        and kernels_run_on(logits.device)
    )


def choose_experts(
    logits: Tensor, num_selected: int, *, detach_normalizer: bool
) -> tuple[Tensor, Tensor]:
    """The best k experts of each token.

    Args:
        logits: `[B, T, N]`, float32.
        num_selected: k.
        detach_normalizer: see `TopKRouter`.

    Returns:
        Their weights `[B, T, k]`, float32, and which they are `[B, T, k]`, int64, the best first; of
        equal ones the first.
    """
    rows = logits.flatten(0, -2)
    weight, index = choice_operators().choose_experts(rows, num_selected, detach_normalizer)
    shape = (*logits.shape[:-1], num_selected)
    return weight.view(shape), index.view(shape)


def choice_operators() -> Any:
    """PyTorch's names for the operators below."""
    return getattr(torch.ops, _CHOICE_LIBRARY)


def _choice_computed_by(x: Tensor) -> dict[str, Callable[..., Any]]:
    from .fast_choice_gpu import OPERATORS

    return OPERATORS


def _compute_choice(name: str, x: Tensor, *args: Any) -> Any:
    return _choice_computed_by(x)[name](x, *args)


# those of the functions in `fast_choice_gpu.py`, whose import takes Triton's
_CHOICE_SCHEMAS = {
    "choose_experts": "(Tensor logits, SymInt num_selected, bool detached) -> (Tensor, Tensor)",
    "choose_experts_backward": "(Tensor grad, Tensor logits, Tensor index, bool detached) -> Tensor",
}
_CHOICE_LIBRARY = library_name(_CHOICE_SCHEMAS)


def _register_choice() -> None:
    defined = define(_CHOICE_SCHEMAS, _compute_choice)
    if not defined:
        return

    @defined["choose_experts"].register_fake
    def _(logits, num_selected, detached):
        shape = logits.shape[0], num_selected
        return logits.new_empty(shape), logits.new_empty(shape, dtype=torch.int64)

    @defined["choose_experts_backward"].register_fake
    def _(grad, logits, index, detached):
        return logits.new_empty(logits.shape)

    def save(ctx, inputs, output):
        logits, _, ctx.detached = inputs
        ctx.save_for_backward(logits, output[1])
        ctx.mark_non_differentiable(output[1])

    def backward(ctx, grad, _):
        grad = choice_operators().choose_experts_backward(grad, *ctx.saved_tensors, ctx.detached)
        return grad, None, None

    defined["choose_experts"].register_autograd(backward, setup_context=save)


_register_choice()
