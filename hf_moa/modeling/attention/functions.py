"""Attention implementations of our own, beside those of transformers' interface."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..core.precision import without_autocast


class GroupedQueries:
    """An attention layer as transformers' implementations see one whose heads of queries share heads of
    keys, each `groups` of them one: with `num_key_value_groups`.

    Args:
        layer: the layer.
        groups: heads of queries for each head of keys.
    """

    def __init__(self, layer: nn.Module, groups: int):
        self.layer, self.num_key_value_groups = layer, groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)


def eager_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Plain attention: `[B, heads, T, dh]` -> `[B, T, heads, dh]` and `[B, heads, T, S]`. Keys and
    values may have fewer heads, each of them for as many heads of queries side by side."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * (scaling or query.shape[-1] ** -0.5)
    if position_bias is not None:
        scores = scores + position_bias
    if attention_mask is not None:
        scores = scores + attention_mask
    attentions = nn.functional.softmax(scores, dim=-1)
    attentions = nn.functional.dropout(attentions, p=dropout, training=module.training)
    return (attentions @ value).transpose(1, 2).contiguous(), attentions


def upcast_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """GPT-2's `reorder_and_upcast_attn`: scores and softmax in float32, also under autocast."""
    # the operator that GPT-2 takes, which scales while it multiplies: to the same last bit
    with without_autocast(query.device.type):
        queries, keys = query.float().flatten(0, 1), key.float().transpose(2, 3).flatten(0, 1)
        scores = torch.baddbmm(
            query.new_empty(1, dtype=torch.float32), queries, keys, beta=0, alpha=scaling
        )
        scores = torch.unflatten(scores, 0, query.shape[:2])
    if attention_mask is not None:
        scores = scores + attention_mask
    attentions = nn.functional.softmax(scores, dim=-1).to(value.dtype)
    attentions = nn.functional.dropout(attentions, p=dropout, training=module.training)
    return (attentions @ value).transpose(1, 2), attentions
