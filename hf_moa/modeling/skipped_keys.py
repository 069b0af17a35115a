"""Attention among the tokens that CCT does not skip, exactly as if all were there.

A skipped key has K = 0 and V = 0: its score is 0, and it still adds `exp(0)` to the denominator of the
softmax. One further key with a score of `log(number of skipped keys)` and V = 0 stands for all of them,
for each query those that it sees. (Half precision rounds that score.)
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .token_rows import TokenRows


def visible_keys(
    attention_mask: Tensor | None, padding_mask: Tensor | None, *, source: Tensor, causal: bool
) -> Tensor | None:
    """Which keys a mask shows to every query (of those up to it, where it is causal).

    Args:
        attention_mask: `[B, 1, T, S]` bool as transformers makes it for SDPA, or None.
        padding_mask: `[B, S]` bool, real tokens among the keys; None for all.
        source: `[B, S, d]`, what the keys are made of.
        causal: queries see no later key.

    Returns:
        `[B, S]` bool, or None: the mask is not so simple.
    """
    batch, length = source.shape[:2]
    if attention_mask is None:
        return source.new_ones(batch, length, dtype=torch.bool)
    if attention_mask.dtype != torch.bool or attention_mask.shape[-1] != length:
        return None
    if not causal:
        keys = attention_mask[:, :, :1]
        is_simple = attention_mask.shape[1] == 1 and bool((attention_mask == keys).all())
        return keys[:, 0, 0].expand(batch, -1) if is_simple else None
    if padding_mask is None:
        return None
    expected = padding_mask[:, None, None] & torch.ones_like(attention_mask).tril()
    return padding_mask if torch.equal(attention_mask, expected) else None


def attend_among_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    query_rows: TokenRows,
    key_rows: TokenRows,
    visible: Tensor,
    causal: bool,
    scaling: float,
) -> Tensor:
    """Contexts of the tokens whose queries are computed.

    Args:
        query: `[1, n, heads, dh]`, of `query_rows`.
        key, value: `[1, m, kv_heads, dh]`, of `key_rows`; `kv_heads` is `heads`, or 1 for all.
        query_rows: the tokens whose queries are not skipped.
        key_rows: the tokens whose keys are visible and not skipped.
        visible: `[B, S]` bool, keys that count at all, skipped or not.
        causal: queries see no later key; then they are of the same tokens as the keys.
        scaling: of the scores.

    Returns:
        `[1, n, heads, dh]`.
    """
    heads = query.shape[2]
    # shape: (B, heads, most queries, dh), (B, kv_heads, most keys + 1, dh)
    query = query_rows.pad(query).transpose(1, 2)
    key, value = (key_rows.pad(x, more=1).transpose(1, 2) for x in (key, value))
    dtype = torch.promote_types(query.dtype, torch.float32)
    bias = _bias(query_rows, key_rows, visible.to(dtype), causal=causal).to(query.dtype).unsqueeze(1)
    if key.shape[1] == 1 and heads > 1:
        if causal:
            key, value = (x.expand(-1, heads, -1, -1) for x in (key, value))
        else:
            # shape: (B, heads, Q, dh) -> (B, 1, Q * heads, dh): further queries
            query = query.transpose(1, 2).flatten(1, 2).unsqueeze(1)
    context = nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=bias, scale=scaling
    )
    context = context.transpose(1, 2).reshape(len(visible), -1, heads, context.shape[-1])
    return query_rows.unpad(context)


def _bias(query_rows: TokenRows, key_rows: TokenRows, visible: Tensor, *, causal: bool) -> Tensor:
    """Added to the scores: `[B, Q or 1, K + 1]`, 0 for the keys there are, -inf for padding and later
    keys, and for the last one the logarithm of the number of skipped keys."""
    skipped = visible.masked_fill(key_rows.chosen, 0.0)
    if not causal:
        number = skipped.sum(dim=1, keepdim=True)
        # a sequence without any key: its context is zero
        number = torch.where(visible.amax(dim=1, keepdim=True) > 0, number, 1.0)
        taken = key_rows.pad(number.new_ones(1, len(key_rows)))
        return torch.cat([taken.log(), number.log()], dim=1).unsqueeze(1)
    # positions from 1 on: 0 is padding
    position = query_rows.pad((query_rows.positions + 1).unsqueeze(0)).unsqueeze(2)
    key_position = key_rows.pad((key_rows.positions + 1).unsqueeze(0)).unsqueeze(1)
    seen = (key_position <= position) & (key_position > 0)
    number = query_rows.pad(query_rows.gather(skipped.cumsum(dim=1).unsqueeze(2)))
    # a query that sees nothing, as of padding: its context is zero
    number = torch.where(seen.any(dim=2, keepdim=True) | (number > 0), number, 1.0)
    return torch.cat([seen.to(visible.dtype).log(), number.log()], dim=2)
