"""Whether a forward runs under a transform, for which hand-written gradients have no formula."""

from __future__ import annotations

import torch


def is_transformed() -> bool:
    """Whether a transform of `torch.func` or forward-mode differentiation is at work."""
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
    )
