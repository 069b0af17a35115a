"""Whether a forward runs under a transform, for which hand-written gradients have no formula."""

from __future__ import annotations

import torch
from torch import Tensor


def is_transformed(*tensors: Tensor) -> bool:
    """Whether a transform of `torch.func` or forward-mode differentiation is at work, or autograd has
    batched gradients among the tensors (`is_grads_batched`)."""
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
        or any(map(torch._C._functorch.is_legacy_batchedtensor, tensors))
    )
