"""A fast form of CCT's attention: tokens with closed gates are skipped, and the result is that of all.

A token whose query is skipped adds only the output projection's bias. One whose key is skipped has K = 0
and V = 0, and is no part of a cache where that saves time: see `skipped_keys.py` and `compact_cache.py`.
The plain form is `AttentionGates.attend_all`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..attention.flow import Attended, AttentionCall, AttentionFlow
from ..cache.gate_states import GatedDynamicLayer, gated_layer
from ..core.linear_slices import is_plain, takes_subsets
from ..core.precision import compute_dtype
from ..core.records import Record
from ..core.tracing import is_traced, is_transformed
from .compact_cache import CompactLayer, compact_cache_pays, make_compact, spread_compact
from .execution import Execution, GatedParts, choose_execution
from .skipped_keys import (
    KeptKeys,
    attend_to_kept_keys,
    gathering_scores_pays,
    scores_to_add,
    visible_keys,
)
from .token_subset import TokenSubset


def may_skip(module: nn.Module, call: AttentionCall, gates: Tensor) -> bool:
    """Whether the gates of an `AttentionGates` are hard, can be looked at, and may skip something."""
    if module.cct_execution == "dense" or module.training or module.is_soft or call.is_paged:
        return False
    return not (is_traced(gates) or is_transformed(gates))


def attend_sparsely(
    module: Any, layer: AttentionFlow, call: AttentionCall, gates: Any, mix: Any, record: Record
) -> Attended:
    """`AttentionGates.attend`, in the form that is fastest.

    Args:
        module: the `AttentionGates`.
        layer, call, mix, record: as for `AttentionGates.attend`.
        gates: its `AttentionGateValues`.
    """
    sparse = _SparseCall(module, layer, call, gates, mix, record)
    execution = sparse.choose_execution()
    if execution is Execution.SUBSET:
        return sparse.attend_of_subset()
    if execution is Execution.COMPACT_KEYS:
        return sparse.attend_of_step()
    all_open = execution is Execution.ALL_OPEN
    return module.attend_all(layer, call, gates, mix, record, all_open=all_open)


def output_of_subset(layer: AttentionFlow, linear: nn.Module, attended: Attended) -> Tensor:
    """The output of a layer some of whose tokens were computed, `[B, T, d]`."""
    subset, mixture = attended.subset, layer.mixture
    if not takes_subsets(linear):
        mix = None if attended.mix is None else subset.scatter(attended.mix)
        return mixture.output(linear, subset.scatter(attended.context), mix)
    output = attended.context.new_zeros(1, 0, layer.hidden_size)
    if len(subset):
        output = mixture.output(linear, attended.context, attended.mix)
    if is_plain(linear):
        return subset.scatter(output, linear.bias)
    # a bias that may be elsewhere: what the projection makes of nothing
    nothing = attended.context.new_zeros(1, 1, *attended.context.shape[2:])
    fill = mixture.output(linear, nothing, mixture.no_mix(attended.mix))
    return subset.scatter(output, fill.flatten())


class _SparseCall:
    """One call of a layer; see `attend_sparsely`."""

    def __init__(
        self,
        module: Any,
        layer: AttentionFlow,
        call: AttentionCall,
        gates: Any,
        mix: Any,
        record: Record,
    ):
        self.module, self.layer, self.call = module, layer, call
        self.gates, self.mix, self.record = gates, mix, record
        self.is_sdpa = layer.attn_implementation == "sdpa"
        self.takes_subsets = all(map(takes_subsets, layer.children()))
        self.cached = self._compact_layer()

    def choose_execution(self) -> Execution:
        """How the call is computed, behind a compact cache or without one."""
        wanted, gates, cost = self.module.cct_execution, self.gates, self.module.cost
        on_compact = wanted == "auto" and self.cached is not None
        batch_size, length = gates.query.shape
        if on_compact and (batch_size == 1 or length > 1):
            wanted = "sparse"
        parts = [GatedParts(gates.query, cost.query)]
        if gates.kv is not None:
            parts.append(GatedParts(gates.kv, cost.kv))
        execution = choose_execution(wanted, *parts)
        if execution is Execution.SUBSET and not self.takes_subsets:
            return Execution.GATED
        if on_compact and execution is not Execution.SUBSET:
            return Execution.COMPACT_KEYS
        return execution

    def attend_of_subset(self) -> Attended:
        """The tokens with open gates."""
        call, layer, gates = self.call, self.layer, self.gates
        queries = TokenSubset(gates.query > 0)
        keys = None if call.source is None else TokenSubset(gates.kv > 0)
        subset_mix = layer.mixture.take(self.mix, queries)
        query, key, value = self._project(queries, keys, subset_mix)
        attentions = None
        if self.cached is not None or self._leaves_keys_out(queries, keys):
            kept = self._kept_keys(key, value, keys)
            context = query  # of the same shape; all there is, where no token asks
            if len(queries):
                context = self._attend_to_kept_keys(query, queries, kept)
        else:
            if keys is not None and key is not None and value is not None:
                key, value = keys.scatter(key), keys.scatter(value)
            if call.place is not None:
                layer.prepare_cache(call.place.cache)
                spread_compact(call.place)
            query = queries.scatter(query)
            # they are rotated already
            unrotated = call._replace(position_embeddings=None)
            query, key, value = layer.with_cached(unrotated, query, key, value)
            context, attentions = layer.attend_to(call, query, key, value, self.mix)
            context = queries.gather(context)
        context = self.module.norm_context(context)
        record = self.module.with_use(call, gates, self.record)
        return Attended(context, attentions, subset_mix, record, queries)

    def attend_of_step(self) -> Attended:
        """One token for each sequence, all of them computed, behind a compact cache."""
        call, layer = self.call, self.layer
        query, key, value = layer.project(call.hidden_states, call.source, self.mix)
        if key is not None:
            key, value = self.module.key_norm(key), self.module.value_norm(value)
            query, key = self._rotate(query, key, *(call.position_embeddings or ()))
        kept = self._kept_keys_of_step(key, value)
        every = TokenSubset.all_of(query)
        context = self._attend_to_kept_keys(every.gather(query), every, kept)
        context = self.module.gate_context(every.scatter(context), self.gates.query)
        return Attended(context, None, self.mix, self.module.with_use(call, self.gates, self.record))

    def _project(
        self, queries: TokenSubset, keys: TokenSubset | None, subset_mix: Any
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Queries `[1, n, heads, dh]` of some tokens, keys and values `[1, m, kv_heads * dh]` of others,
        normed and rotated."""
        call, layer = self.call, self.layer
        x = queries.gather(call.hidden_states)
        is_whole = queries.is_all and keys is not None and keys.is_all
        query: Tensor
        key: Tensor | None = None
        value: Tensor | None = None
        if is_whole and call.source is call.hidden_states:
            query, key, value = layer.project(x, x, subset_mix)
        else:  # of no tokens nothing is projected, which some quantised layers cannot
            query = self._empty(layer.num_heads, layer.head_dim)
            if len(queries):
                query = layer.project_query(x, subset_mix)
            if keys is not None and call.source is not None:
                key = value = self._empty(layer.num_kv_heads * layer.head_dim)
                if len(keys):
                    key, value = layer.project_key_value(keys.gather(call.source))
        if keys is None or key is None:
            return query, None, None
        key, value = self.module.key_norm(key), self.module.value_norm(value)
        if layer.rotate is not None and call.position_embeddings is not None:
            embeddings = [x.expand(*queries.chosen.shape, -1) for x in call.position_embeddings]
            query, _ = self._rotate(query, None, *map(queries.gather, embeddings))
            _, key = self._rotate(None, key, *map(keys.gather, embeddings))
        return query, key, value

    def _empty(self, *size: int) -> Tensor:
        """What a projection makes of no tokens, `[1, 0, *size]`."""
        x = self.call.hidden_states
        return x.new_zeros(1, 0, *size, dtype=compute_dtype(x))

    def _rotate(self, query: Any, key: Any, *embeddings: Tensor) -> tuple[Any, Any]:
        """Queries `[B, T, heads, dh]` and keys `[B, T, kv_heads * dh]`, rotated; None stays."""
        layer = self.layer
        if layer.rotate is None:
            return query, key
        q: Any = None
        k: Any = None
        if query is not None:
            q = query.transpose(1, 2)
        if key is not None:
            k = torch.unflatten(key, -1, (layer.num_kv_heads, layer.head_dim)).transpose(1, 2)
        q_rotated, k_rotated = layer.rotate(k if q is None else q, q if k is None else k, *embeddings)
        return (
            None if q is None else q_rotated.transpose(1, 2),
            None if k is None else k_rotated.transpose(1, 2).flatten(2),
        )

    def _leaves_keys_out(self, queries: TokenSubset, keys: TokenSubset | None) -> bool:
        """Whether attention without a cache leaves skipped keys out too."""
        call = self.call
        if keys is None or not self.is_sdpa or call.place is not None:
            return False
        if call.position_bias is None or self.module.cct_execution == "sparse":
            return True
        return gathering_scores_pays(queries, keys, masked=call.attention_mask is not None)

    def _compact_layer(self) -> CompactLayer | None:
        """The layer of the cache, where it is compact or becomes so with this call."""
        place = self.call.place
        if place is None:
            return None
        held = gated_layer(place)
        if isinstance(held, CompactLayer):
            return held if self.is_sdpa else None
        if type(held) is not GatedDynamicLayer or not self._becomes_compact(held):
            return None
        return make_compact(place)

    def _becomes_compact(self, held: GatedDynamicLayer) -> bool:
        layer, cost = self.layer, self.module.cost
        pays = self.module.cct_execution == "sparse" or compact_cache_pays(
            held,
            self.gates.kv,
            size=layer.num_kv_heads * layer.head_dim,
            token_cost=cost.query + cost.kv,
        )
        return pays and self.is_sdpa and self.takes_subsets

    def _kept_keys(
        self, key: Tensor | None, value: Tensor | None, subset: TokenSubset | None
    ) -> KeptKeys:
        """All keys that are not skipped: those of a subset, `[1, n, num_kv_heads * dh]` (None where they
        are cached), and the cached ones."""
        cached, place = self.cached, self.call.place
        if key is not None and value is not None and subset is not None:
            shape = (self.layer.num_kv_heads, self.layer.head_dim)
            key, value = (torch.unflatten(x, -1, shape) for x in (key, value))
            if cached is None or place is None:
                return KeptKeys.of(subset, key, value)
            place.own.update(key, value, place.layer_idx, subset=subset)
            place.note_filled()
        return cached.kept_keys  # type: ignore[union-attr]  # what is not projected is cached

    def _kept_keys_of_step(self, key: Tensor | None, value: Tensor | None) -> KeptKeys:
        """The same of all tokens' keys and values, `[B, S, num_kv_heads * dh]`."""
        cached = self.cached
        if key is None or value is None:
            return self._kept_keys(None, None, None)
        if cached is not None and cached.is_initialized and not self.layer.is_cross_attention:
            shape = (self.layer.num_kv_heads, self.layer.head_dim)
            key, value = (torch.unflatten(x, -1, shape).transpose(1, 2) for x in (key, value))
            cached.append_step(key, value, self.gates.kv > 0)
            return cached.kept_keys
        subset = TokenSubset(self.gates.kv > 0)
        return self._kept_keys(subset.gather(key), subset.gather(value), subset)

    def _attend_to_kept_keys(self, query: Tensor, queries: TokenSubset, kept: KeptKeys) -> Tensor:
        """Contexts `[1, n, heads, dh]` of the queries of a subset."""
        call, layer = self.call, self.layer
        length = queries.chosen.shape[1]
        is_simple, visible = visible_keys(
            call.attention_mask,
            call.kv_mask,
            num_queries=length,
            num_keys=kept.length,
            causal=layer.is_causal,
        )
        scores = None
        if not is_simple or call.position_bias is not None:
            bias = call.position_bias
            scores = scores_to_add(
                None if is_simple else call.attention_mask,
                None if bias is None else layer.mixture.position_bias(bias, self.mix),
                causal=layer.is_causal,
                like=query.new_empty(1, 1, length, kept.length),
            )
        return attend_to_kept_keys(
            query,
            kept,
            queries=queries,
            visible=visible,
            scores=scores,
            causal=layer.is_causal and length > 1,
            scaling=layer.scaling,
        )
