"""Masks of a call: what attention may look at, and which tokens are real, as gates have to know it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask

from ..cache.place import own_cache
from .tracing import is_traced


def self_mask(config: Any, tokens: Tensor, mask: Tensor | None, cache: Cache | None) -> Any:
    """What the tokens `[B, T, d]` may look at among themselves, and of those in the cache."""
    if config.is_decoder:
        own = None if cache is None else own_cache(cache, is_cross=False)
        return create_causal_mask(config, tokens, mask, own)
    return create_bidirectional_mask(config, tokens, mask)


def cross_masks(
    config: Any, tokens: Tensor, source: Tensor | None, mask: Tensor | None
) -> tuple[Any, Tensor | None]:
    """What the tokens `[B, T, d]` may look at in the source `[B, S, d]`, and `padding_mask_of` the
    source; None for both where there is no source."""
    if source is None:
        return None, None
    seen = create_bidirectional_mask(config, tokens, mask, encoder_hidden_states=source)
    return seen, padding_mask_of(mask, source.shape[1])


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
