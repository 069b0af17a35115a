"""Auxiliary losses where the loss is computed outside the model, of its logits or hidden states.

Such a loss leaves out `outputs.aux_loss`. The hidden states then carry its gradient, where a user asks
for that (`GatedModel.carry_aux_loss`); where not, a backward pass without it is noticed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from transformers.utils import logging

from .tracing import needs_autograd

logger = logging.get_logger(__name__)


class _Carrier:
    """What one forward's backward pass has to know.

    Attributes:
        weight: of the auxiliary losses' gradient; None adds none.
        is_reached: whether the backward pass has come to the hidden states.
        is_counted: whether it has come to the auxiliary losses.
    """

    def __init__(self, weight: float | None):
        self.weight = weight
        self.is_reached = self.is_counted = False

    def reach(self, grad: Tensor | None = None) -> None:
        """Note that the backward pass has come to the hidden states."""
        self.is_reached = True
        Variable._execution_engine.queue_callback(self._finish)

    def only_once(self, grad: Tensor) -> Tensor | None:
        """The gradient of the auxiliary losses without what the hidden states have added to it, where
        the loss has them itself."""
        self.is_counted = True
        if self.weight is None or not self.is_reached:
            return None
        return torch.where(grad == self.weight, grad, grad - self.weight)

    def _finish(self) -> None:
        if self.is_reached and not self.is_counted:
            logger.warning_once(
                "A loss was computed of a gated model's logits or hidden states without its auxiliary "
                "losses, so that neither routers nor budgets are held to anything. Add "
                "`outputs.aux_loss`, or call `model.carry_aux_loss()` before training."
            )
        self.is_reached = self.is_counted = False


class _Carry(torch.autograd.Function):
    """The hidden states, behind which the auxiliary losses have a gradient."""

    @staticmethod
    def forward(ctx, hidden_states, aux_loss, carrier):
        ctx.carrier = carrier
        ctx.like = aux_loss.detach()
        return hidden_states.view_as(hidden_states)

    @staticmethod
    def backward(ctx, grad):
        ctx.carrier.reach()
        return grad, torch.full_like(ctx.like, ctx.carrier.weight), None


def carried(hidden_states: Tensor, aux_loss: Tensor | None, weight: float | None) -> Tensor:
    """The hidden states `[B, T, d]` of a training step, whose backward pass adds the gradient of
    `aux_loss` times `weight`, unless the loss has `aux_loss` itself; with a weight of None, it warns
    where it has not.

    Raises:
        ValueError: a weight, and the model is compiled, or under a transform of `torch.func`.
    """
    if aux_loss is None or not (aux_loss.requires_grad and hidden_states.requires_grad):
        return hidden_states
    if needs_autograd(hidden_states):
        if weight is not None:
            raise ValueError(
                "carry_aux_loss works in neither compiled models nor transforms of torch.func: add "
                "outputs.aux_loss to the loss."
            )
        return hidden_states
    carrier = _Carrier(weight)
    aux_loss.register_hook(carrier.only_once)
    if weight is not None:
        carry: Any = _Carry.apply
        return carry(hidden_states, aux_loss, carrier)
    hidden_states.register_hook(carrier.reach)
    return hidden_states
