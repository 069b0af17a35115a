"""Which tokens of a call are real, as gates have to know it."""

from __future__ import annotations

import torch
from torch import Tensor

from .tracing import is_traced


def padding_mask_of(attention_mask: Tensor | None, length: int, past: int | Tensor = 0) -> Tensor | None:
    """The real ones of the `length` tokens behind `past` cached ones, `[B, length]` bool; None where
    the mask does not tell: there is none, or it is one of pairs, `[B, 1, T, S]`. None too where all are
    real, if that is known without waiting for an accelerator. The mask may go on behind them, as one
    for all slots of a static cache does."""
    if attention_mask is None or attention_mask.ndim != 2:
        return None
    spare = max(attention_mask.shape[1] - length, 0)
    if isinstance(past, int):
        start = min(past, spare)
        mask = attention_mask[:, start : start + length].bool()
    else:  # of a static cache, to be read without waiting for it
        columns = past.clamp(max=spare) + torch.arange(length, device=past.device)
        mask = attention_mask[:, columns.to(attention_mask.device)].bool()
    if mask.device.type == "cpu" and not is_traced(mask) and mask.all():
        return None
    return mask
