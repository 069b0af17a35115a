"""The flow that every gated attention layer shares: route, project, attend, gate.

`GatedAttention` knows neither a backbone nor how a mixture decides. A backbone subclasses it and
supplies the projections under its own parameter names; a mixture (`multi_head.MultiHead`,
`mae.MixtureOfHeads`, `moa.MixtureOfAttentionExperts`) says how tokens become queries and how heads
become the output; CCT (`cct.GatedAttentionControl`) says which tokens take part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.import_utils import is_tracing

from .cct import AttentionGates, GatedAttentionControl, sublayer_norm
from .cct_costs import AttentionCost, used_and_full
from .gate_cache import Window, gated_layer
from .linear_slices import is_plain, takes_rows
from .mae import MixtureOfHeads
from .moa import MixtureOfAttentionExperts
from .multi_head import MultiHead
from .skipped_keys import attend_among_rows, visible_keys
from .token_rows import TokenRows, skips


class AttentionResult(NamedTuple):
    """What `GatedAttention` returns.

    Attributes:
        context: `[B, T, heads, dh]`, gated, before the output projection; `[1, n, heads, dh]` of `rows`.
            In inference the projection may change it in place.
        attentions: `[B, heads, T, S]` where the implementation gives them, else None.
        mix: the mixture's decision, for `mixture.output`.
        record: named tensors of this layer: gates, losses and costs.
        rows: the tokens that were computed, where the others were skipped.
    """

    context: Tensor
    attentions: Tensor | None
    mix: Any
    record: dict[str, Any]
    rows: TokenRows | None = None


class GatedAttention(nn.Module):
    """Attention whose heads are a mixture and whose tokens may be skipped.

    A subclass registers its projections, implements `project_query` and `project_key_value`, and ends
    with `update`.

    Args:
        config: a `GatingConfig`.
        hidden_size, num_heads, head_dim: d, h (k for MoA) and dh.
        scaling: factor of the scores.
        attention_dropout: dropout on the attention probabilities.
        is_causal: self-attention that sees no later token.
        is_cross_attention: keys and values come from other tokens.
        gates_are_causal: MAE gates see no later token: in every layer of a decoder.
        layer_idx: of the cache.
        norm: makes CCT's extra norms for a width, as the backbone's own are.

    Attributes:
        mixture: `MultiHead`, `MixtureOfHeads` or `MixtureOfAttentionExperts`.
        cct: `GatedAttentionControl`, or None.
        num_kv_heads: heads of keys and values, 1 for MoA.
        cost: what a token and a key cost.
    """

    def __init__(
        self,
        config,
        *,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        scaling: float,
        attention_dropout: float,
        is_causal: bool,
        is_cross_attention: bool,
        gates_are_causal: bool,
        layer_idx: int,
        norm: Callable[[int], nn.Module],
    ):
        super().__init__()
        self.config = config
        self.head_dim = head_dim
        self.is_moa = config.attention_type == "moa"
        self.num_kv_heads = 1 if self.is_moa else num_heads
        self.scaling = scaling
        self.attention_dropout = attention_dropout
        self.is_causal = is_causal
        self.is_cross_attention = is_cross_attention
        self.layer_idx = layer_idx
        self.mixture = build_mixture(
            config,
            hidden_size=hidden_size,
            num_heads=num_heads,
            head_dim=head_dim,
            gates_are_causal=gates_are_causal,
        )
        self.cost = AttentionCost.of(
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=head_dim,
        )
        self.cct = None
        if config.has_cct:
            self.cct = GatedAttentionControl(
                hidden_size=hidden_size,
                gate_hidden_size=config.cct_gate_hidden_size,
                kv_size=self.num_kv_heads * head_dim,
                context_size=head_dim if self.is_moa else num_heads * head_dim,
                joint_context=not self.is_moa,
                norm=sublayer_norm(config, norm),
                is_cross_attention=is_cross_attention,
                starts_open=not config.cct_sublayer_norm,
            )

    def project_query(self, hidden_states: Tensor, mix: Any) -> Tensor:
        """`[B, T, d]` and the mixture's decision -> queries `[B, T, heads, dh]`."""
        raise NotImplementedError

    def project_key_value(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """`[B, S, d]` -> keys and values, two of `[B, S, num_kv_heads * dh]`."""
        raise NotImplementedError

    def project(
        self, hidden_states: Tensor, source: Tensor | None, mix: Any
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Queries, and the keys and values of `source`, if there is one. A subclass that has one matrix
        for all three overrides it."""
        query = self.project_query(hidden_states, mix)
        return query, *((None, None) if source is None else self.project_key_value(source))

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

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        *,
        encoder_hidden_states: Tensor | None = None,
        padding_mask: Tensor | None = None,
        encoder_padding_mask: Tensor | None = None,
        position_bias: Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> AttentionResult:
        """
        Args:
            hidden_states: `[B, T, d]`.
            attention_mask: what transformers' masking utilities made for the implementation.
            encoder_hidden_states: `[B, S, d]`, in cross-attention.
            padding_mask: `[B, T]` bool, the real ones of these tokens; None for all.
            encoder_padding_mask: `[B, S]` bool, the same of `encoder_hidden_states`.
            position_bias: added to the scores, one for each head that the layer has: `[1, h, T, S]`,
                for MoA `[1, N, T, S]`.
            past_key_values: the cache, if any.
            kwargs: handed on to the attention implementation.
        """
        mix, record = self.mixture.route(
            hidden_states,
            padding_mask,
            self._gate_window(hidden_states, padding_mask, past_key_values),
        )
        source = self._source(hidden_states, encoder_hidden_states, past_key_values)
        gates = None if self.cct is None else self.cct.gates(hidden_states, source)
        kv_mask = encoder_padding_mask if self.is_cross_attention else padding_mask
        if gates is not None and self._skips(gates):
            return self._forward_sparse(
                hidden_states,
                source,
                gates,
                mix,
                record,
                attention_mask,
                padding_mask=padding_mask,
                kv_mask=kv_mask,
                past_key_values=past_key_values,
                position_bias=position_bias,
                **kwargs,
            )
        query, key, value = self.project(hidden_states, source, mix)
        if gates is not None and key is not None:
            key, value = self.cct.gate_key_value(key, value, gates.kv)
        key, value = self._key_value(key, value, past_key_values, hidden_states.device)
        context, attentions = self._attend(
            query, key, value, attention_mask, position_bias, mix, **kwargs
        )
        if gates is not None:
            context = self.cct.gate_context(context, gates.query)
            record |= self._cct_record(gates, padding_mask, kv_mask, past_key_values)
        return AttentionResult(context, attentions, mix, record)

    def _forward_sparse(
        self,
        hidden_states: Tensor,
        source: Tensor | None,
        gates: AttentionGates,
        mix: Any,
        record: dict[str, Any],
        attention_mask: Any,
        *,
        padding_mask: Tensor | None,
        kv_mask: Tensor | None,
        past_key_values: Cache | None,
        position_bias: Tensor | None,
        **kwargs: Any,
    ) -> AttentionResult:
        """The same as the dense flow, of the tokens whose gates are open."""
        query_rows = TokenRows(gates.query > 0)
        row_mix = self.mixture.take(mix, query_rows)
        query = self.project_query(query_rows.gather(hidden_states), row_mix)
        attentions = key = value = visible = None
        if source is not None:
            if position_bias is None and self._is_sdpa():
                visible = self._visible_keys(attention_mask, kv_mask, source, past_key_values)
            key_rows = TokenRows(gates.kv > 0 if visible is None else (gates.kv > 0) & visible)
            key, value = self.project_key_value(key_rows.gather(source))
            key, value = self.cct.key_norm(key), self.cct.value_norm(value)
        if visible is not None:
            row_key, row_value = (
                x.unflatten(-1, (self.num_kv_heads, self.head_dim)) for x in (key, value)
            )
            context = attend_among_rows(
                query,
                row_key,
                row_value,
                query_rows=query_rows,
                key_rows=key_rows,
                visible=visible,
                causal=self.is_causal,
                scaling=self.scaling,
            )
        if visible is None or past_key_values is not None:
            if key is not None:
                key, value = key_rows.scatter(key), key_rows.scatter(value)
            key, value = self._key_value(key, value, past_key_values, hidden_states.device)
        if visible is None:
            context, attentions = self._attend(
                query_rows.scatter(query), key, value, attention_mask, position_bias, mix, **kwargs
            )
            context = query_rows.gather(context)
        context = self.cct.norm_context(context)
        record |= self._cct_record(gates, padding_mask, kv_mask, past_key_values)
        return AttentionResult(context, attentions, row_mix, record, query_rows)

    def _skips(self, gates: AttentionGates) -> bool:
        """Whether this call computes the tokens with open gates alone."""
        return (
            not (self.training or self.cct.is_soft)
            and all(map(takes_rows, self.children()))
            and skips(
                self.config.cct_execution, gates.query if gates.kv is None else gates.kv, gates.query
            )
        )

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        position_bias: Tensor | None,
        mix: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of `[B, T, heads, dh]` to `[B, num_kv_heads, S, dh]`: contexts
        `[B, T, heads, dh]`, and the probabilities where the implementation gives them."""
        batch, length, heads = query.shape[:3]
        if position_bias is not None:
            position_bias = self.mixture.position_bias(position_bias, mix)
            if self.config._attn_implementation == "flex_attention":
                position_bias = position_bias.expand(batch, -1, -1, -1)  # it does not broadcast
            kwargs["position_bias"] = position_bias
        if self._takes_heads_for_queries(query, attention_mask, position_bias):
            # shape: (B, T, k, dh) -> (B, 1, T * k, dh)
            query = query.flatten(1, 2).unsqueeze(1)
            attention_mask = None if attention_mask is None else attention_mask[:, :, :1]
            kwargs["is_causal"] = False
        else:
            query = query.transpose(1, 2)
            if self.num_kv_heads == 1 and heads > 1:
                # stride 0: one set of keys serves every head, whatever the implementation
                key, value = (x.expand(-1, heads, -1, -1) for x in (key, value))
        context, attentions = self.attention_function()(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        return context.reshape(batch, length, heads, self.head_dim), attentions

    def _takes_heads_for_queries(
        self, query: Tensor, attention_mask: Any, position_bias: Tensor | None
    ) -> bool:
        """Whether the heads that share their keys can stand in one head, as further queries: the same
        attention, in larger products. All of a sequence's queries must see the same keys."""
        length, heads = query.shape[1:3]
        if self.num_kv_heads > 1 or heads == 1 or position_bias is not None:
            return False
        if not self._is_sdpa():
            return False
        if attention_mask is None:
            return length == 1 or not self.is_causal
        if attention_mask.shape[1] > 1:
            return False
        if length == 1:
            return True
        if attention_mask.device.type != "cpu" or is_tracing(attention_mask):
            return False
        return bool((attention_mask == attention_mask[:, :, :1]).all())

    def _visible_keys(
        self,
        attention_mask: Tensor | None,
        kv_mask: Tensor | None,
        source: Tensor,
        past_key_values: Cache | None,
    ) -> Tensor | None:
        """`visible_keys`, where these are all the keys there are: none is in the cache, and none that is
        put there is left out now."""
        if past_key_values is not None and not self.is_cross_attention:
            layer = gated_layer(past_key_values, self.layer_idx)
            if layer.is_initialized and int(layer.get_seq_length()) > 0:
                return None
        visible = visible_keys(attention_mask, kv_mask, source=source, causal=self.is_causal)
        if visible is None or past_key_values is None or bool(visible.all()):
            return visible
        return None

    def _is_sdpa(self) -> bool:
        return self.config._attn_implementation == "sdpa"

    def prepare_cache(self, past_key_values: Cache) -> None:
        """Make an empty cache able to hold what this layer's gates remember.

        Raises:
            ValueError: it is of a kind that cannot.
        """
        if self.mixture.remembers:
            gated_layer(past_key_values, self.layer_idx)
        if self.cct is not None:
            gated_layer(past_key_values, self.layer_idx, cross=self.is_cross_attention)

    def attention_function(self) -> Callable:
        """The attention implementation that the model is set to."""
        return ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )

    def _gate_window(
        self, hidden_states: Tensor, padding_mask: Tensor | None, past_key_values: Cache | None
    ) -> Window | None:
        """The inputs that a causal MAE gate averages, the cached ones included."""
        if past_key_values is None or not self.mixture.remembers:
            return None
        name = "cross_gate_inputs" if self.is_cross_attention else "gate_inputs"
        layer = gated_layer(past_key_values, self.layer_idx)
        return layer.window(name, hidden_states, padding_mask, size=self.mixture.window)

    def _source(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None,
        past_key_values: Cache | None,
    ) -> Tensor | None:
        """The tokens that keys and values are projected from; None where they are cached."""
        if not self.is_cross_attention:
            return hidden_states
        if past_key_values is not None and past_key_values.is_updated.get(self.layer_idx):
            return None
        return encoder_hidden_states

    def _key_value(
        self,
        key: Tensor | None,
        value: Tensor | None,
        past_key_values: Cache | None,
        device: torch.device,
    ) -> tuple[Tensor, Tensor]:
        """Keys and values `[B, num_kv_heads, S, dh]`, of the projected ones and the cache."""
        cache = past_key_values
        if isinstance(cache, EncoderDecoderCache):
            cache = (
                cache.cross_attention_cache if self.is_cross_attention else cache.self_attention_cache
            )
        if key is None:
            layer = cache.layers[self.layer_idx]
            # an offloaded cache brings back only the layers that are updated
            return layer.keys.to(device), layer.values.to(device)
        key, value = (
            x.unflatten(-1, (self.num_kv_heads, self.head_dim)).transpose(1, 2) for x in (key, value)
        )
        if cache is not None:
            self.prepare_cache(past_key_values)  # before a plain layer takes the first keys
            key, value = cache.update(key, value, self.layer_idx)
            if self.is_cross_attention:
                past_key_values.is_updated[self.layer_idx] = True
        return key, value

    def _cct_record(
        self,
        gates: AttentionGates,
        padding_mask: Tensor | None,
        kv_mask: Tensor | None,
        past_key_values: Cache | None,
    ) -> dict[str, Tensor]:
        """Gates of this call and its `cost` `[B, 2]`, used and full."""
        query = used_and_full(gates.query, padding_mask)
        kv = None if gates.kv is None else used_and_full(gates.kv, kv_mask)
        keys = self._keys_in_sight(kv, past_key_values)
        cost = self.cost.per_sequence(query=query, kv=kv, keys=keys)
        return {"query_gate": gates.query, "kv_gate": gates.kv, "cost": cost}

    def _keys_in_sight(self, kv: Tensor | None, past_key_values: Cache | None) -> Tensor:
        """How many keys each query attends to, skipped ones left out and counted: `[B, T or 1, 2]`.

        Args:
            kv: `[B, S, 2]`, of `used_and_full`; None where keys are cached.
        """
        past = None
        if past_key_values is not None:
            layer = gated_layer(past_key_values, self.layer_idx, cross=self.is_cross_attention)
            if kv is None:
                return layer.counted("keys").unsqueeze(1)
            past = layer.count("keys", kv).unsqueeze(1)
        keys = kv.cumsum(dim=1) if self.is_causal else kv.sum(dim=1, keepdim=True)
        return keys if past is None else keys + past


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
    """Plain attention: `[B, heads, T, dh]` -> `[B, T, heads, dh]` and `[B, heads, T, S]`."""
    scores = query @ key.transpose(2, 3) * (scaling or query.shape[-1] ** -0.5)
    if position_bias is not None:
        scores = scores + position_bias
    if attention_mask is not None:
        scores = scores + attention_mask
    attentions = nn.functional.softmax(scores, dim=-1)
    attentions = nn.functional.dropout(attentions, p=dropout, training=module.training)
    return (attentions @ value).transpose(1, 2).contiguous(), attentions


def build_mixture(
    config, *, hidden_size: int, num_heads: int, head_dim: int, gates_are_causal: bool
) -> nn.Module:
    """The mixture that a gating configuration asks for.

    Args:
        config: a `GatingConfig`.
        hidden_size, num_heads, head_dim: d, h (k for MoA) and dh.
        gates_are_causal: MAE gates see no later token.
    """
    if config.attention_type == "moa":
        return MixtureOfAttentionExperts(
            hidden_size=hidden_size,
            num_experts=config.attention_experts,
            num_selected=num_heads,
            router_type=config.router_type,
        )
    if config.attention_type == "mae":
        return MixtureOfHeads(
            hidden_size=hidden_size,
            num_heads=num_heads,
            head_dim=head_dim,
            num_dropped=config.mae_num_dropped_heads,
            gate_type=config.mae_gate_type,
            gate_hidden_size=config.mae_gate_hidden_size,
            gate_dropout=config.mae_gate_dropout,
            is_causal=gates_are_causal,
            window=config.mae_gate_window,
        )
    return MultiHead(num_heads=num_heads, head_dim=head_dim)
