"""Attention of the first heads: how a nested budget computes an attention layer.

    y = sum_{j <= n} w_j H_j

with the output `H_j` of head j and its weight `w_j`: 1, or with MAE the gate's.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..attention.flow import Attended, AttentionCall, AttentionFlow
from ..cache.place import CachePlace
from ..core.linear_slices import of_first_inputs, output_slice
from ..core.records import Record
from ..parallel.ranks import ONE_RANK, Ranks
from .budgets import NestedBudget, NestedUse


class NestedHeads(nn.Module):
    """What an attention layer computes of its heads. It has no parameters: heads are slices of the
    layer's projections.

    Args:
        fewest_heads: those of the smallest budget.
    """

    def __init__(self, fewest_heads: int = 1):
        super().__init__()
        self.fewest_heads = fewest_heads

    def attend(self, layer: AttentionFlow, call: AttentionCall, mix: Any, record: Record) -> Attended:
        """A layer's attention of the heads that the call's budget has."""
        refuse_grouped_queries(layer.num_heads, layer.num_kv_heads)
        budget: NestedBudget = call.budget
        heads = layer.mixture.num_heads if budget is None else budget.heads
        number = self.ranks.count(heads)
        # not of the rank's own: all ranks have to send alike
        if has_all := heads == layer.mixture.num_heads:
            query, key, value = layer.project(call.hidden_states, call.source, mix)
        else:
            query, key, value = _project(layer, call, number)
        _check_cache(call)
        query, key, value = layer.with_cached(call, query, key, value)
        if call.position_bias is not None and not has_all:
            call = call._replace(position_bias=call.position_bias[:, :heads])
        if call.is_paged and not has_all:  # pages have room for all heads
            missing = layer.num_heads - number
            query = nn.functional.pad(query, (0, 0, 0, missing))
            key, value = (nn.functional.pad(x, (0, 0, 0, 0, 0, missing)) for x in (key, value))
        with self.ranks.own_draws(layer.training):
            context, attentions = layer.attend_to(call, query, key, value, mix)
        if not has_all:
            context = context[:, :, :number]  # a page's are of all heads
            mix = layer.mixture.take_heads(mix, number)
        if budget is not None and budget.head_mask is not None:
            context = context * self.ranks.part(budget.head_mask, 2)
        macs = 4 * layer.hidden_size * layer.head_dim
        mask = call.padding_mask if call.token is None else call.kv_mask
        use = NestedUse(macs, call.all_tokens.shape[1], mask)
        record = record._replace(use=use)
        return Attended(context, attentions, mix, record, subset=number)

    def output(self, layer: AttentionFlow, linear: nn.Module, attended: Attended) -> Tensor:
        """See `AttentionFlow.output`: the layer's projection of these heads."""
        size = layer.num_heads * layer.head_dim
        if attended.subset != layer.num_heads:
            linear = partial(of_first_inputs, linear, size=size)  # type: ignore[assignment]  # calls do
        return layer.mixture.output(linear, attended.context, attended.mix)

    # what has a part of the heads
    ranks: Ranks = ONE_RANK

    def spread_over(self, ranks: Ranks) -> None:
        """Compute the rank's of the heads that a budget has.

        Raises:
            ValueError: at the smallest budget, a rank would have none.
        """
        if ranks.number > self.fewest_heads:
            raise ValueError(
                "tp_size must be at most the heads of the smallest of nested_budgets, "
                f"{self.fewest_heads} (got {ranks.number}): extract(budget) gives a plain model of a "
                "larger one."
            )
        self.ranks = ranks

    def prepare_cache(self, place: CachePlace) -> None:
        """Nothing: a cache holds the heads that it is given."""

    def count_skippable(self, queries: int, keys: int, pairs: int) -> int:
        """Nothing that a gate skips."""
        return 0


def refuse_grouped_queries(num_heads: int, num_kv_heads: int) -> None:
    """Check that each head has its own keys: the first heads then are a layer of their own.

    Raises:
        ValueError: some share theirs.
    """
    if num_kv_heads != num_heads:
        raise ValueError(
            "nested_budgets must be None where queries share keys: a budget takes the first heads (got "
            f"{num_heads} heads of queries and {num_kv_heads} of keys)."
        )


def _project(
    layer: AttentionFlow, call: AttentionCall, number: int
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Queries `[B, T, n, dh]`, and keys and values `[B, S, n * dh]` where there is a source."""

    def of_first(x: Tensor, projection: tuple[nn.Module, int]) -> Tensor:
        module, start = projection
        return output_slice(module, x, start, start + number * layer.head_dim)

    of_query, of_key, of_value = layer.head_projections
    query = torch.unflatten(of_first(call.hidden_states, of_query), -1, (number, layer.head_dim))
    if call.source is None:
        return query, None, None
    return query, of_first(call.source, of_key), of_first(call.source, of_value)


def _check_cache(call: AttentionCall) -> None:
    """Check that a layer's cache has as many tokens as the first layer's.

    Raises:
        ValueError: it has none: it was filled at a budget with fewer layers.
    """
    place = call.place
    if place is None or place.is_cross or place.layer_idx == 0:
        return
    first, own = (place.own.get_seq_length(i) for i in (0, place.layer_idx))
    length = call.all_tokens.shape[1]
    if isinstance(own, int) and isinstance(first, int) and own + length != first:
        raise ValueError(
            "budget must have no layers that the cache was filled without (layer "
            f"{place.layer_idx} holds {own} of {first - length} tokens): use a cache at one budget."
        )
