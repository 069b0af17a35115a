"""CCT's part in one attention layer (Bapna et al. 2020): which tokens take part.

This is the plain form: every token is computed, and multiplied by its gates. `sparse_attention.py`
computes the same of the tokens with open gates only, and so does `open_tokens.py` on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..attention.flow import Attended, AttentionCall, AttentionFlow
from ..cache.gate_states import gated_layer
from ..cache.place import CachePlace
from ..core.records import Record
from ..parallel.ranks import ONE_RANK, Ranks
from .budgets import Budget
from .compact_cache import spread_compact
from .control import ControlNetwork
from .costs import AttentionCost, AttentionUse, used_and_full
from .open_tokens import (
    OpenTokens,
    attend_open_tokens,
    attends_open_tokens,
    output_of_open_tokens,
)
from .sparse_attention import attend_sparsely, may_skip, output_of_subset


class AttentionGateValues(NamedTuple):
    """Gates of one attention layer: `kv` `[B, S]` and `query` `[B, T]`; `kv` is None where keys
    and values come from the cache."""

    kv: Tensor | None
    query: Tensor


class AttentionGates(nn.Module):
    """The gates of an attention layer's tokens, and attention as they let it through.

    One gate for the key and value projections of a token, one for its query, attention and output:
    `K = g_kv LN(Y Wk)`, `V = g_kv LN(Y Wv)`, `z = x + g_q Dropout(LN(a)) Wo`. A skipped key has logit 0
    and counts in the softmax. Biases of the output projection are not gated.

    Args:
        hidden_size: d.
        gate_hidden_size: of `ControlNetwork`.
        num_heads, num_kv_heads, head_dim: h, heads of keys and values, dh.
        joint_context: whether LN(a) normalises all heads together, or each (attention expert) by itself.
        norm: makes LN for a width.
        context_dropout: rate of that dropout.
        is_cross_attention: keys and values come from other tokens, with a control network of
            their own.
        is_causal: queries see no later key.
        starts_open, num_budgets, is_hard: see `ControlNetwork`.
        execution: "auto", "sparse" or "dense", in eval.
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        gate_hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        joint_context: bool = True,
        norm: Callable[[int], nn.Module] = lambda size: nn.Identity(),
        context_dropout: float = 0.0,
        is_cross_attention: bool = False,
        is_causal: bool = False,
        starts_open: bool = True,
        num_budgets: int = 0,
        is_hard: bool = False,
        execution: str = "auto",
    ):
        super().__init__()
        self.joint_context = joint_context
        self.is_causal = is_causal
        self.cct_execution = execution
        self.cost = AttentionCost.of(
            hidden_size=hidden_size, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim
        )

        def network(num_gates: int) -> ControlNetwork:
            return ControlNetwork(
                hidden_size=hidden_size,
                gate_hidden_size=gate_hidden_size,
                num_gates=num_gates,
                starts_open=starts_open,
                num_budgets=num_budgets,
                is_hard=is_hard,
                execution=execution,
            )

        self.control = network(1 if is_cross_attention else 2)
        self.source_control = network(1) if is_cross_attention else None
        self.key_norm = norm(num_kv_heads * head_dim)
        self.value_norm = norm(num_kv_heads * head_dim)
        self.context_norm = norm(num_heads * head_dim if joint_context else head_dim)
        self.context_dropout = nn.Dropout(context_dropout)

    # what has a part of the heads
    ranks: Ranks = ONE_RANK

    def spread_over(self, ranks: Ranks) -> None:
        """Gate the tokens of a rank's heads."""
        self.ranks = ranks

    @property
    def is_soft(self) -> bool:
        """Whether the control networks decide softly: in training, if only theirs."""
        networks = (self.control, self.source_control)
        return any(network.training for network in networks if network is not None)

    def forward(
        self, hidden_states: Tensor, source: Tensor | None, budget: Budget | None = None
    ) -> AttentionGateValues:
        """Gates for the tokens `[B, T, d]` and, in cross-attention, for `source` `[B, S, d]`
        (None where keys and values are cached)."""
        gates = self.control(hidden_states, budget)
        if self.source_control is None:
            return AttentionGateValues(kv=gates[..., 0], query=gates[..., 1])
        kv = None if source is None else self.source_control(source, budget)[..., 0]
        return AttentionGateValues(kv=kv, query=gates[..., 0])

    def attend(self, layer: AttentionFlow, call: AttentionCall, mix: Any, record: Record) -> Attended:
        """A layer's attention, as the gates let it through. What decides is `forward`."""
        gates = self(call.all_tokens, call.source, call.budget)
        if call.token is not None:
            gates = gates._replace(query=call.token.gather(gates.query))
        if call.budget is not None and call.budget.is_plain:
            return self.attend_all(layer, call, gates, mix, record, all_open=True)
        if attends_open_tokens(self, layer, call):
            return attend_open_tokens(self, layer, call, gates, mix, record)
        if may_skip(self, call, gates.query):
            return attend_sparsely(self, layer, call, gates, mix, record)
        return self.attend_all(layer, call, gates, mix, record)

    def attend_all(
        self,
        layer: AttentionFlow,
        call: AttentionCall,
        gates: AttentionGateValues,
        mix: Any,
        record: Record,
        *,
        all_open: bool = False,
    ) -> Attended:
        """Every token, times its gates; `all_open` says that all gates are."""
        kv_gate, query_gate = (None, None) if all_open else gates
        query, key, value = layer.project(call.hidden_states, call.source, mix)
        if key is not None and value is not None:
            key, value = self.gate_key_value(key, value, kv_gate)
        if call.place is not None:
            layer.prepare_cache(call.place.cache)
            spread_compact(call.place)
        query, key, value = layer.with_cached(call, query, key, value)
        context, attentions = layer.attend_to(call, query, key, value, mix)
        context = self.gate_context(context, query_gate)
        return Attended(context, attentions, mix, self.with_use(call, gates, record))

    def gate_key_value(self, key: Tensor, value: Tensor, gate: Tensor | None) -> tuple[Tensor, Tensor]:
        """`g_kv LN(.)` of `key` and `value` `[B, S, kv_size]`; None for gates that are all open."""
        key, value = self.key_norm(key), self.value_norm(value)
        if gate is None:
            return key, value
        gate = self.ranks.shared(gate).unsqueeze(-1).to(key.dtype)
        return key * gate, value * gate

    def gate_context(self, context: Tensor, gate: Tensor | None) -> Tensor:
        """`g_q Dropout(LN(a))` of `context` `[B, T, heads, dh]`; None for gates that are all open."""
        context = self.context_dropout(self.norm_context(context))
        if gate is None:
            return context
        return context * self.ranks.shared(gate)[..., None, None].to(context.dtype)

    def norm_context(self, context: Tensor) -> Tensor:
        """`LN(a)` of `context` `[B, T, heads, dh]`."""
        if not self.joint_context:
            return self.context_norm(context)
        return self.context_norm(context.flatten(-2)).view(context.shape)

    def output(self, layer: AttentionFlow, linear: nn.Module, attended: Attended) -> Tensor:
        """See `AttentionFlow.output`, where tokens were skipped: they add the projection's bias only."""
        if isinstance(attended.subset, OpenTokens):
            return output_of_open_tokens(layer, linear, attended)
        return output_of_subset(layer, linear, attended)

    def prepare_cache(self, place: CachePlace) -> None:
        """Make an empty cache able to count keys."""
        gated_layer(place)

    def with_use(self, call: AttentionCall, gates: AttentionGateValues, record: Record) -> Record:
        """The record with what this call makes use of; a cache counts its keys."""
        past = None
        if call.place is not None:
            layer = gated_layer(call.place)
            if gates.kv is None:
                past = layer.counted("keys")
            else:
                past = layer.count("keys", used_and_full(gates.kv, call.kv_mask))
        use = AttentionUse(
            self.cost,
            self.is_causal and call.token is None,
            gates.query,
            gates.kv,
            past,
            call.padding_mask,
            call.kv_mask,
        )
        return record._replace(use=use)

    def count_skippable(self, queries: int, keys: int, pairs: int) -> int:
        """Multiply-accumulates that the budget is a share of."""
        return queries * self.cost.query + keys * self.cost.kv + pairs * self.cost.pair
