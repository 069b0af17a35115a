"""A fast form of attention whose heads all share one head of keys: the heads stand as further queries.

The same attention, in larger products. All of a sequence's queries must see the same keys.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..core.tracing import is_traced


def takes_heads_as_queries(
    layer: Any, query: Tensor, attention_mask: Any, position_bias: Tensor | None
) -> bool:
    """Whether an `AttentionFlow` may compute `[B, T, heads, dh]` so."""
    length, heads = query.shape[1:3]
    if layer.num_kv_heads > 1 or heads == 1 or position_bias is not None:
        return False
    if layer.attn_implementation != "sdpa":
        return False
    if attention_mask is None:
        return length == 1 or not layer.is_causal
    if attention_mask.shape[1] > 1:
        return False
    if length == 1:
        return True
    if attention_mask.device.type != "cpu" or is_traced(attention_mask):
        return False
    return bool((attention_mask == attention_mask[:, :, :1]).all())


def heads_as_queries(query: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """`[B, T, heads, dh]` -> `[B, 1, T * heads, dh]`, and a mask `[B, 1, T, S]` -> `[B, 1, 1, S]`."""
    mask = None if attention_mask is None else attention_mask[:, :, :1]
    return query.flatten(1, 2).unsqueeze(1), mask
