"""Attention to the keys that CCT does not skip, exactly as if all were there.

A skipped key has K = 0 and V = 0: its score is 0 (or its bias, where scores have one), and it still adds
`exp(score)` to the denominator of the softmax. One key with V = 0 stands for all of them; its score is
the logarithm of their sum, for each query of those that it sees.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..core.precision import at_least_float32, autocasts, without_autocast
from .token_subset import TokenSubset


class KeptKeys(NamedTuple):
    """The keys of S tokens that are not skipped, each sequence's behind one another.

    Attributes:
        key, value: `[B, kv_heads, 1 + K, dh]`; zero in slot 0, which stands for the skipped ones.
        position: `[B, 1 + K]` int64, of the tokens; -1 in slot 0 and behind a sequence's last key.
        length: S.
    """

    key: Tensor
    value: Tensor
    position: Tensor
    length: int

    @classmethod
    def of(cls, subset: TokenSubset, key: Tensor, value: Tensor) -> KeptKeys:
        """Of `key` and `value` `[1, n, kv_heads, dh]` of the tokens in a subset."""
        key, value = (subset.pad(x, before=1).transpose(1, 2) for x in (key, value))
        position = subset.pad((subset.positions + 1).unsqueeze(0), before=1) - 1
        return cls(key, value, position, subset.chosen.shape[1])

    @property
    def is_key(self) -> Tensor:
        """`[B, 1 + K]` bool, slots that hold one."""
        return self.position >= 0

    @property
    def skipped(self) -> Tensor:
        """`[B, S]` bool, tokens whose keys are not here."""
        skipped = self.position.new_ones(self.position.shape[0], 1 + self.length, dtype=torch.bool)
        return skipped.scatter_(1, self.position + 1, False)[:, 1:]

    def among(self, visible: Tensor) -> Tensor:
        """`[B, 1 + K]` bool, slots that hold a key of the tokens `visible` `[B or 1, S]`."""
        visible = visible.expand(len(self.position), -1)
        return visible.gather(1, self.position.clamp(min=0)) & self.is_key


def visible_keys(
    attention_mask: Tensor | None,
    padding_mask: Tensor | None,
    *,
    num_queries: int,
    num_keys: int,
    causal: bool,
) -> tuple[bool, Tensor | None]:
    """Which keys a mask shows to every query (of those up to it, where it is causal).

    Args:
        attention_mask: `[B, 1, T, S]` bool as transformers makes it for SDPA, or None.
        padding_mask: `[B, S]` bool, real tokens among the keys; None for all.
        num_queries, num_keys: T and S.
        causal: queries see no later key.

    Returns:
        Whether the mask is so simple, and the keys `[B or 1, S]` bool, None for all.
    """
    causal = causal and num_queries > 1
    if causal and num_queries != num_keys:
        return False, None
    if attention_mask is None:
        return True, None
    if attention_mask.dtype != torch.bool or attention_mask.shape[-1] != num_keys:
        return False, None
    if attention_mask.shape[1] == attention_mask.shape[2] == 1:
        return True, attention_mask[:, 0, 0]
    if causal:
        expected = torch.ones_like(attention_mask).tril()
        if padding_mask is not None:
            expected = padding_mask[:, None, None] & expected
        is_simple = torch.equal(attention_mask, expected)
        return is_simple, padding_mask if is_simple else None
    keys = attention_mask[:, :, :1]
    is_simple = attention_mask.shape[1] == 1 and bool((attention_mask == keys).all())
    return is_simple, keys[:, 0, 0] if is_simple else None


def scores_to_add(
    attention_mask: Tensor | None, position_bias: Tensor | None, *, causal: bool, like: Tensor
) -> Tensor:
    """What a mask and a bias add to the scores, in one: `[B or 1, h or 1, T, S]`, `-inf` for keys that a
    query does not see.

    Args:
        attention_mask: `[B, 1, T, S]`, bool or to be added; None for none.
        position_bias: `[B or 1, h, T, S]`, or None.
        causal: whether queries see no later key, where no mask says so.
        like: `[..., T, S]`, of the size of the scores.
    """
    scores = like.new_zeros(like.shape) if position_bias is None else position_bias
    scores = at_least_float32(scores)
    if attention_mask is None:
        queries, keys = scores.shape[-2:]
        if not causal or queries == 1:
            return scores
        attention_mask = scores.new_ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    if attention_mask.dtype == torch.bool:
        return scores.masked_fill(~attention_mask, float("-inf"))
    if not attention_mask.is_floating_point():
        raise ValueError(
            "attention_mask of pairs of tokens must be bool (True where a query sees a key), or "
            f"floating, to be added to the scores (got {attention_mask.dtype}); convert it with .bool()."
        )
    return scores + attention_mask


def gathering_scores_pays(queries: TokenSubset, key_subset: TokenSubset, *, masked: bool) -> bool:
    """Whether attention with a position bias is faster to the kept keys than to all, as measured on a
    CPU: each sequence then has a bias of its own, as it has under a mask.

    Args:
        masked: there is an attention mask.
    """
    if key_subset.chosen.shape[1] < _LEAST_LENGTH:
        return False
    share = len(queries) * len(key_subset) / (queries.chosen.numel() * key_subset.chosen.numel())
    return share < (0.4 if masked else 0.12)


def attend_to_kept_keys(
    query: Tensor,
    keys: KeptKeys,
    *,
    queries: TokenSubset,
    visible: Tensor | None,
    scores: Tensor | None,
    causal: bool,
    scaling: float,
) -> Tensor:
    """Contexts of the tokens whose queries are computed.

    Args:
        query: `[1, n, heads, dh]`, of `queries`.
        keys: of `heads` heads, or of fewer, each for as many heads of queries side by side.
        queries: the tokens whose queries are not skipped.
        visible: `[B or 1, S]` bool, keys that count at all, skipped or not; None for all.
        scores: `[B or 1, heads or 1, T, S]`, added to the scores; None for nothing.
        causal: without `scores`: queries see no later key. Then T = S.
        scaling: of the scores.

    Returns:
        `[1, n, heads, dh]`.
    """
    heads = query.shape[2]
    batch_size = len(keys.position)
    dtype = torch.promote_types(query.dtype, torch.float32)
    # shape: (B, heads, most queries, dh)
    query = queries.pad(query).transpose(1, 2)
    if scores is None and not causal:
        bias = _bias(keys, visible, dtype)
    else:
        all_are_visible = visible is None
        if visible is None:
            visible = keys.position.new_ones(batch_size, keys.length, dtype=torch.bool)
        if scores is None:
            bias = _causal_bias(queries, keys, visible, dtype)
        elif all_are_visible and scores.shape[0] == scores.shape[2] == 1 and not torch.is_grad_enabled():
            bias = _bias_of_step(scores, keys)
        else:
            bias = _bias_of_scores(scores, queries, keys, visible)
    key, value = keys.key, keys.value
    if 1 < key.shape[1] < heads:
        key, value = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))
    elif key.shape[1] == 1 and heads > 1:
        if bias.shape[1] == bias.shape[2] == 1:
            # shape: (B, heads, Q, dh) -> (B, 1, Q * heads, dh): further queries
            query = query.transpose(1, 2).flatten(1, 2).unsqueeze(1)
        else:
            key, value = (x.expand(-1, heads, -1, -1) for x in (key, value))
    if not autocasts(query.device.type):  # the cache may be of a call under autocast
        key, value = key.to(query.dtype), value.to(query.dtype)
    # half precision would round the logarithms; the CPU's kernels need not
    bias = bias if query.device.type == "cpu" else bias.to(query.dtype)
    context = nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=bias, scale=scaling
    )
    context = context.transpose(1, 2).reshape(batch_size, -1, heads, context.shape[-1])
    return queries.unpad(context)


# What is added to the scores: -inf in slots without a key and for keys that are not seen, and in slot 0
# the logarithm of what the skipped keys add to the denominator. A query that sees nothing, as of
# padding, has 1 for it: its context is zero.


def _bias(keys: KeptKeys, visible: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The same for every query and head: `[B, 1, 1, 1 + K]`."""
    if visible is None:
        taken = keys.is_key
        number = keys.length - taken.sum(dim=1)
    else:
        taken = keys.among(visible)
        number = torch.where(visible.any(dim=1), (visible & keys.skipped).sum(dim=1), 1)
    taken = taken.to(dtype)
    taken[:, 0] = number
    return taken.log()[:, None, None]


def _causal_bias(queries: TokenSubset, keys: KeptKeys, visible: Tensor, dtype: torch.dtype) -> Tensor:
    """`[B, 1, Q, 1 + K]`, of queries that see no later key."""
    # positions from 1 on: 0 is padding
    position = queries.pad((queries.positions + 1).unsqueeze(0)).unsqueeze(2)
    taken = keys.among(visible).unsqueeze(1) & (keys.position.unsqueeze(1) < position)
    skipped = (visible & keys.skipped).cumsum(dim=1)
    number = queries.pad(queries.gather(skipped))
    number = torch.where(taken.any(dim=2) | (number > 0), number, 1)
    taken = taken.to(dtype)
    taken[..., 0] = number
    return taken.log().unsqueeze(1)


def _bias_of_scores(scores: Tensor, queries: TokenSubset, keys: KeptKeys, visible: Tensor) -> Tensor:
    """`[B, heads or 1, Q, 1 + K]`."""
    infinity, batch_size = float("inf"), len(keys.position)
    position = queries.pad(queries.positions.unsqueeze(0))
    # shape: (B, heads or 1, T) -> (B, heads or 1, Q)
    total = _sum_of_skipped(scores, visible & keys.skipped)
    total = total.gather(2, position.unsqueeze(1).expand(-1, total.shape[1], -1))
    at_query, at_key = position.unsqueeze(2), keys.position.clamp(min=0).unsqueeze(1)
    if scores.shape[0] == 1:
        bias = scores[0][:, at_query, at_key].transpose(0, 1)
    else:
        batch = torch.arange(batch_size, device=scores.device)[:, None, None]
        bias = scores[batch, :, at_query, at_key].permute(0, 3, 1, 2)
    taken = keys.among(visible)[:, None, None]
    bias = bias.masked_fill_(~taken, -infinity)  # indexing has made it
    bias[..., 0] = total
    sees_nothing = bias.amax(dim=-1) == -infinity
    bias[..., 0] = bias[..., 0].masked_fill(sees_nothing, 0.0)
    return bias


def _bias_of_step(scores: Tensor, keys: KeptKeys) -> Tensor:
    """The same of one query for each sequence, of scores that all sequences share, outside of a graph:
    in fewer operators."""
    scores = scores[0, :, 0]  # [heads, S]
    index = keys.position + 1
    table = nn.functional.pad(scores, (1, 0), value=-float("inf"))
    # shape: (heads, B * (1 + K)) -> (B, heads, 1, 1 + K)
    bias = torch.unflatten(table.index_select(1, index.flatten()), 1, index.shape)
    bias = bias.transpose(0, 1).unsqueeze(2)
    skipped = scores.new_ones(len(index), 1 + keys.length).scatter_(1, index, 0.0)[:, 1:]
    largest = scores.amax(dim=1)
    with without_autocast(scores.device.type):
        total = skipped @ (scores - largest.unsqueeze(1)).exp().t()  # [B, heads]
    is_lost = ~(total >= _SMALLEST_SUM).all(dim=1) & (skipped.sum(dim=1) > 0)
    if bool(is_lost.any()):
        hidden = scores.masked_fill(skipped.unsqueeze(1) == 0, -float("inf"))
        total = hidden.logsumexp(dim=2)
        sees_nothing = torch.maximum(total, bias[:, :, 0].amax(dim=2)) == -float("inf")
        total = total.masked_fill_(sees_nothing, 0.0)
    else:
        total = total.log_().add_(largest)
    bias[:, :, 0, 0] = total
    return bias


def _sum_of_skipped(scores: Tensor, skipped: Tensor) -> Tensor:
    """Logarithm of the sum of `exp(scores)` of the keys that are visible and skipped: `[B, h, T]`.

    Args:
        scores: `[B or 1, h, T, S]`.
        skipped: `[B, S]` bool.
    """
    infinity = float("inf")
    largest = scores.detach().amax(dim=-1, keepdim=True)
    largest = torch.where(largest == -infinity, 0.0, largest)
    terms = (scores - largest).exp()
    with without_autocast(scores.device.type):
        if scores.shape[0] == 1:
            # shape: (h, T, S) @ (S, B) -> (B, h, T)
            total = (terms[0] @ skipped.to(terms.dtype).t()).permute(2, 0, 1)
        else:
            total = (terms @ skipped.to(terms.dtype)[:, None, :, None]).squeeze(-1)
    is_small = total < _SMALLEST_SUM
    if not bool(is_small.any()):
        return total.log() + largest.squeeze(-1)
    is_none = ~((scores > -infinity) & skipped[:, None, None]).any(dim=-1)
    if bool((is_small & ~is_none).any()):  # far below the largest score, of a key that is not skipped
        scores = scores.masked_fill(~skipped[:, None, None], -infinity)
        total = scores.masked_fill(is_none.unsqueeze(-1), 0.0).logsumexp(dim=-1)
    else:
        total = total.masked_fill(is_none, 1.0).log() + largest.squeeze(-1)  # which has a gradient
    return total.masked_fill(is_none, -infinity)


# Tokens of a sequence whose attention is worth a bias of its own.
_LEAST_LENGTH = 48
# Of terms that are at most 1, a sum below this may have lost some.
_SMALLEST_SUM = 1e-25
