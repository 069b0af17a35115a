"""Continuous batching: a cache in pages, which transformers' attention implementations fill."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from .naming import PAGED_CACHE

# up to transformers 5.23 the attention implementations themselves add keys to a paged cache
_IMPLEMENTATIONS_TAKE_PAGED_CACHE = "cache" in inspect.signature(sdpa_attention_forward).parameters


def with_paged_keys(
    key: Tensor, value: Tensor, kwargs: dict[str, Any], *, layer_idx: int
) -> tuple[Tensor, Tensor]:
    """Keys and values `[1, heads, n, dh]` of new tokens, added to the paged cache in `kwargs`.

    Args:
        kwargs: for the attention implementation. The paged cache leaves them, and adds to them what
            implementations have to know.

    Returns:
        Those of earlier tokens too; only the new ones where transformers' implementations do the rest.
    """
    paged = kwargs.pop(PAGED_CACHE)
    if _IMPLEMENTATIONS_TAKE_PAGED_CACHE:
        kwargs["cache"] = paged
        return key, value
    return paged.update(key, value, layer_idx, kwargs=kwargs)
