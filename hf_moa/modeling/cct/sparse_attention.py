"""Attention that skips the tokens whose CCT gates are closed, and gives what it would if it did not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..attention.gated_attention import AttentionCall, AttentionResult, GatedAttention
from ..cache.gate_states import GatedDynamicLayer, gated_layer
from ..core.linear_slices import is_plain, takes_rows
from ..core.tracing import is_traced, is_transformed
from .compact_cache import OpenKeysLayer, open_in_place, open_keys_pay
from .gates import AttentionGates
from .skipped_keys import (
    OpenKeys,
    attend_to_open_keys,
    gathering_scores_pays,
    scores_to_add,
    visible_keys,
)
from .token_subset import Execution, GatedParts, TokenRows, choose_execution


class SparseAttention(GatedAttention):
    """`GatedAttention` that skips tokens in eval, as the config's `cct_execution` says.

    A token whose query is skipped adds nothing but the output projection's bias. One whose key is
    skipped has K = 0 and V = 0, and is no part of a cache where that saves time; see `skipped_keys.py`.
    """

    def update(self, linear: nn.Module, result: AttentionResult) -> Tensor:
        """What the layer adds to the stream, `[B, T, d]`: `linear` is its output projection."""
        rows = result.rows
        if rows is not None and not takes_rows(linear):
            mix = None if result.mix is None else rows.scatter(result.mix)
            return self.mixture.output(linear, rows.scatter(result.context), mix)
        update = self.mixture.output(linear, result.context, result.mix)
        if rows is None:
            return update
        if is_plain(linear):
            return rows.scatter(update, linear.bias)
        # a bias that may be elsewhere: what the projection makes of nothing
        nothing = result.context.new_zeros(1, 1, *result.context.shape[2:])
        fill = self.mixture.output(linear, nothing, self.mixture.no_mix(result.mix))
        return rows.scatter(update, fill.flatten())

    def _compute(
        self, call: AttentionCall, gates: AttentionGates | None, mix: Any, record: dict[str, Any]
    ) -> AttentionResult:
        if gates is None or not self._may_skip(call, gates):
            return self._compute_all(call, gates, mix, record)
        cached = self._cached_open_keys(call, gates)
        execution = self._choose_execution(gates, cached)
        if execution is Execution.ROWS:
            return self._compute_rows(call, gates, mix, record, cached)
        if execution is Execution.OPEN_KEYS:
            return self._compute_step(call, gates, mix, record, cached)
        return self._compute_all(call, gates, mix, record, all_open=execution is Execution.OPEN)

    def _may_skip(self, call: AttentionCall, gates: AttentionGates) -> bool:
        """Whether gates are hard, can be looked at, and may skip something."""
        if self.config.cct_execution == "dense" or self.training or self.cct.is_soft or call.is_paged:
            return False
        return not (is_traced(gates.query) or is_transformed(gates.query))

    def _choose_execution(self, gates: AttentionGates, cached: OpenKeysLayer | None) -> Execution:
        """How this call is computed, behind a cache of open keys or without one."""
        wanted = self.config.cct_execution
        on_open_keys = wanted == "auto" and cached is not None
        batch_size, length = gates.query.shape
        if on_open_keys and (batch_size == 1 or length > 1):
            wanted = "sparse"
        parts = [GatedParts(gates.query, self.cost.query)]
        if gates.kv is not None:
            parts.append(GatedParts(gates.kv, self.cost.kv))
        execution = choose_execution(wanted, *parts)
        if execution is Execution.ROWS and not self._takes_rows():
            return Execution.GATED
        if on_open_keys and execution is not Execution.ROWS:
            return Execution.OPEN_KEYS
        return execution

    def _takes_rows(self) -> bool:
        return all(map(takes_rows, self.children()))

    def _compute_rows(
        self,
        call: AttentionCall,
        gates: AttentionGates,
        mix: Any,
        record: dict[str, Any],
        cached: OpenKeysLayer | None,
    ) -> AttentionResult:
        """The same as the dense flow, of the tokens whose gates are open."""
        query_rows = TokenRows(gates.query > 0)
        key_rows = None if call.source is None else TokenRows(gates.kv > 0)
        row_mix = self.mixture.take(mix, query_rows)
        query, key, value = self._project_rows(call, query_rows, key_rows, row_mix)
        attentions = None
        if cached is not None or self._leaves_keys_out(call, query_rows, key_rows):
            keys = self._open_keys(call, cached, key, value, key_rows)
            context = query  # of the same shape; all there is, where no token asks
            if len(query_rows):
                context = self._attend_to_open_keys(call, query, query_rows, keys, mix)
        else:
            if key is not None:
                key, value = key_rows.scatter(key), key_rows.scatter(value)
            key, value = self._key_value(call, key, value)
            context, attentions = self._attend(call, query_rows.scatter(query), key, value, mix)
            context = query_rows.gather(context)
        context = self.cct.norm_context(context)
        record["use"] = self._use(call, gates)
        return AttentionResult(context, attentions, row_mix, record, query_rows)

    def _compute_step(
        self,
        call: AttentionCall,
        gates: AttentionGates,
        mix: Any,
        record: dict[str, Any],
        cached: OpenKeysLayer,
    ) -> AttentionResult:
        """The same of one token for each sequence, all of them computed, behind a cache of open keys."""
        query, key, value = self.project(call.hidden_states, call.source, mix)
        if key is not None:
            key, value = self.cct.key_norm(key), self.cct.value_norm(value)
        keys = self._open_keys_of_step(call, cached, key, value, gates)
        rows = TokenRows.all_of(query)
        context = self._attend_to_open_keys(call, rows.gather(query), rows, keys, mix)
        context = self.cct.gate_context(rows.scatter(context), gates.query)
        record["use"] = self._use(call, gates)
        return AttentionResult(context, None, mix, record)

    def _project_rows(
        self, call: AttentionCall, query_rows: TokenRows, key_rows: TokenRows | None, row_mix: Any
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """`project`, of the tokens `query_rows` and `key_rows`, and the norms of keys and values."""
        x = query_rows.gather(call.hidden_states)
        if not self.is_cross_attention and query_rows.is_all and key_rows.is_all:
            query, key, value = self.project(x, x, row_mix)
        else:
            query, key, value = self.project_query(x, row_mix), None, None
            if call.source is not None:
                key, value = self.project_key_value(key_rows.gather(call.source))
        if key is not None:
            key, value = self.cct.key_norm(key), self.cct.value_norm(value)
        return query, key, value

    def _leaves_keys_out(
        self, call: AttentionCall, query_rows: TokenRows, key_rows: TokenRows | None
    ) -> bool:
        """Whether attention without a cache leaves skipped keys out too."""
        if not self._is_sdpa() or call.cache is not None:
            return False
        if call.position_bias is None or self.config.cct_execution == "sparse":
            return True
        return gathering_scores_pays(query_rows, key_rows, masked=call.attention_mask is not None)

    def _cached_open_keys(self, call: AttentionCall, gates: AttentionGates) -> OpenKeysLayer | None:
        """The layer of the cache that holds open keys alone, or does from this call on."""
        if call.cache is None:
            return None
        place = {"layer_idx": self.layer_idx, "cross": self.is_cross_attention}
        layer = gated_layer(call.cache, **place)
        if isinstance(layer, OpenKeysLayer):
            return layer if self._is_sdpa() else None
        if type(layer) is not GatedDynamicLayer or not self._opens(layer, gates):
            return None
        return open_in_place(call.cache, **place)

    def _opens(self, layer: GatedDynamicLayer, gates: AttentionGates) -> bool:
        """Whether a layer of the cache holds open keys alone from now on."""
        pays = self.config.cct_execution == "sparse" or open_keys_pay(
            layer,
            gates.kv,
            size=self.num_kv_heads * self.head_dim,
            token_cost=self.cost.query + self.cost.kv,
        )
        return pays and self._is_sdpa() and self._takes_rows()

    def _open_keys(
        self,
        call: AttentionCall,
        cached: OpenKeysLayer | None,
        key: Tensor | None,
        value: Tensor | None,
        rows: TokenRows | None,
    ) -> OpenKeys:
        """All keys that are not skipped: those of `rows`, `[1, n, num_kv_heads * dh]` (None where they
        are cached), and the cached ones."""
        if key is not None:
            shape = (self.num_kv_heads, self.head_dim)
            key, value = (torch.unflatten(x, -1, shape) for x in (key, value))
            if cached is None:
                return OpenKeys.of(rows, key, value)
            self._cache(call).update(key, value, self.layer_idx, rows=rows)
            self._note_updated(call)
        return cached.open_keys

    def _open_keys_of_step(
        self,
        call: AttentionCall,
        cached: OpenKeysLayer,
        key: Tensor | None,
        value: Tensor | None,
        gates: AttentionGates,
    ) -> OpenKeys:
        """The same of all tokens' keys and values, `[B, S, num_kv_heads * dh]`."""
        rows = None
        if key is not None and cached.is_initialized and not self.is_cross_attention:
            shape = (self.num_kv_heads, self.head_dim)
            key, value = (torch.unflatten(x, -1, shape).transpose(1, 2) for x in (key, value))
            cached.append_step(key, value, gates.kv > 0)
            return cached.open_keys
        if key is not None:
            rows = TokenRows(gates.kv > 0)
            key, value = rows.gather(key), rows.gather(value)
        return self._open_keys(call, cached, key, value, rows)

    def _attend_to_open_keys(
        self, call: AttentionCall, query: Tensor, query_rows: TokenRows, keys: OpenKeys, mix: Any
    ) -> Tensor:
        """Contexts `[1, n, heads, dh]` of the queries of `query_rows`."""
        length = query_rows.chosen.shape[1]
        is_simple, visible = visible_keys(
            call.attention_mask,
            call.kv_mask,
            num_queries=length,
            num_keys=keys.length,
            causal=self.is_causal,
        )
        scores = None
        if not is_simple or call.position_bias is not None:
            bias = call.position_bias
            scores = scores_to_add(
                None if is_simple else call.attention_mask,
                None if bias is None else self.mixture.position_bias(bias, mix),
                causal=self.is_causal,
                like=query.new_empty(1, 1, length, keys.length),
            )
        return attend_to_open_keys(
            query,
            keys,
            query_rows=query_rows,
            visible=visible,
            scores=scores,
            causal=self.is_causal and length > 1,
            scaling=self.scaling,
        )
