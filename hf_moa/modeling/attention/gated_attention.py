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
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..cache.gate_states import GatePast, check_held_keys, gated_layer, is_empty, own_cache
from ..cache.naming import CACHE_NAME, PAGED_CACHE, takes_cache_by_any_name, with_paged_keys
from ..cct.compact_cache import spread_open_keys
from ..cct.costs import AttentionCost, AttentionUse, used_and_full
from ..cct.gates import AttentionGates, GatedAttentionControl, attention_dropouts, sublayer_norm
from ..cct.token_subset import TokenRows
from ..core.tracing import is_traced
from .functions import GroupedQueries, eager_attention_forward
from .mixtures import build_mixture

# Names of what MAE gates hold in a layer of the cache: in training their inputs, in eval what their
# first matrix makes of these, which are of another width.
_GATE_STATES = ("gate_inputs", "gate_features")
_CROSS_GATE_STATES = ("cross_gate_inputs", "cross_gate_features")


class AttentionCall(NamedTuple):
    """What `GatedAttention` is called with; see its `forward`.

    Attributes:
        source: `[B, S, d]`, the tokens that keys and values are projected from; None where they are
            cached.
        kv_mask: `[B, S]` bool, the real ones of them; None for all.
        kwargs: for the attention implementation.
    """

    hidden_states: Tensor
    source: Tensor | None
    attention_mask: Any
    position_bias: Tensor | None
    padding_mask: Tensor | None
    kv_mask: Tensor | None
    cache: Cache | None
    kwargs: dict[str, Any]

    @property
    def is_paged(self) -> bool:
        """Whether this is continuous batching: requests side by side in one row, and a cache of which
        all of them have pages."""
        return self.kwargs.get(PAGED_CACHE) is not None


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
        output_dropout: the backbone's, of `attention_dropouts`.
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
        output_dropout: float,
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
                context_dropout=attention_dropouts(config, output_dropout)[0],
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
        return self.mixture.output(linear, result.context, result.mix)

    @takes_cache_by_any_name
    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        *,
        encoder_hidden_states: Tensor | None = None,
        padding_mask: Tensor | None = None,
        encoder_padding_mask: Tensor | None = None,
        position_bias: Tensor | None = None,
        cache: Cache | None = None,
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
            cache: the cache, if any.
            kwargs: handed on to the attention implementation.

        Raises:
            ValueError: continuous batching of learned MAE gates.
        """
        call = AttentionCall(
            hidden_states,
            self._source(hidden_states, encoder_hidden_states, cache),
            attention_mask,
            position_bias,
            padding_mask,
            encoder_padding_mask if self.is_cross_attention else padding_mask,
            cache,
            kwargs,
        )
        if call.is_paged and self.mixture.remembers:
            raise ValueError(
                "Learned MAE gates cannot tell apart the requests that continuous batching packs into "
                "one row (got a paged cache): use generate in the place of generate_batch."
            )
        mix, record = self.mixture.route(hidden_states, padding_mask, self._gate_past(cache))
        gates = None if self.cct is None else self.cct.gates(hidden_states, call.source)
        return self._compute(call, gates, mix, record)

    def _compute(
        self, call: AttentionCall, gates: AttentionGates | None, mix: Any, record: dict[str, Any]
    ) -> AttentionResult:
        """What `forward` returns; see `_compute_all`."""
        return self._compute_all(call, gates, mix, record)

    def _compute_all(
        self,
        call: AttentionCall,
        gates: AttentionGates | None,
        mix: Any,
        record: dict[str, Any],
        *,
        all_open: bool = False,
    ) -> AttentionResult:
        """Every token, times its gates.

        Args:
            gates: of CCT; None without it.
            mix, record: of the mixture.
            all_open: whether all gates are.
        """
        query, key, value = self.project(call.hidden_states, call.source, mix)
        kv_gate, query_gate = (None, None) if gates is None or all_open else gates
        if gates is not None and key is not None:
            key, value = self.cct.gate_key_value(key, value, kv_gate)
        key, value = self._key_value(call, key, value)
        context, attentions = self._attend(call, query, key, value, mix)
        if gates is not None:
            context = self.cct.gate_context(context, query_gate)
            record["use"] = self._use(call, gates)
        return AttentionResult(context, attentions, mix, record)

    def _attend(
        self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, mix: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of `[B, T, heads, dh]` to `[B, num_kv_heads, S, dh]`: contexts
        `[B, T, heads, dh]`, and the probabilities where the implementation gives them."""
        attention_mask, position_bias, kwargs = call.attention_mask, call.position_bias, {**call.kwargs}
        batch, length, heads = query.shape[:3]
        layer: Any = self
        if position_bias is not None:
            position_bias = self.mixture.position_bias(position_bias, mix)
            if self.config._attn_implementation == "flex_attention":
                position_bias = position_bias.expand(batch, -1, -1, -1)  # it does not broadcast
            kwargs["position_bias"] = position_bias
        if call.is_paged:  # the cache holds one head of keys, and gives those of earlier calls
            query = query.transpose(1, 2)
            key, value = with_paged_keys(key, value, kwargs, layer_idx=self.layer_idx)
            layer = GroupedQueries(self, heads // self.num_kv_heads)
        elif self._takes_heads_for_queries(query, attention_mask, position_bias):
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
            layer,
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
        if attention_mask.device.type != "cpu" or is_traced(attention_mask):
            return False
        return bool((attention_mask == attention_mask[:, :, :1]).all())

    def _is_sdpa(self) -> bool:
        return self.config._attn_implementation == "sdpa"

    def prepare_cache(self, cache: Cache) -> None:
        """Make an empty cache able to hold what this layer's gates remember.

        Raises:
            ValueError: it is of a kind that cannot.
        """
        if self.mixture.remembers:
            gated_layer(cache, self.layer_idx)
        if self.cct is not None:
            gated_layer(cache, self.layer_idx, cross=self.is_cross_attention)

    def attention_function(self) -> Callable:
        """The attention implementation that the model is set to."""
        return ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )

    def _gate_past(self, cache: Cache | None) -> GatePast | None:
        """What a causal MAE gate finds in the cache; None where it has no use for one."""
        if cache is None or not self.mixture.remembers:
            return None
        layer = gated_layer(cache, self.layer_idx)
        names = _CROSS_GATE_STATES if self.is_cross_attention else _GATE_STATES
        name, other = names if self.mixture.pools_inputs else reversed(names)
        if other in layer.states:
            if not is_empty(layer):
                raise ValueError(
                    f"{CACHE_NAME} was filled in another mode, train() or eval(), than the model is "
                    "in now, and its gates remember other numbers there. Use a cache in one mode."
                )
            for each in (other, f"{other}_valid"):  # as after a reset
                layer.states.pop(each, None)
        return GatePast(layer, name, self.mixture.window)

    def _source(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None,
        cache: Cache | None,
    ) -> Tensor | None:
        """The tokens that keys and values are projected from; None where they are cached."""
        if not self.is_cross_attention:
            return hidden_states
        if cache is not None and cache.is_updated.get(self.layer_idx):
            return None
        return encoder_hidden_states

    def _cache(self, call: AttentionCall) -> Cache:
        return own_cache(call.cache, cross=self.is_cross_attention)

    def _note_updated(self, call: AttentionCall) -> None:
        if self.is_cross_attention:
            call.cache.is_updated[self.layer_idx] = True

    def _key_value(
        self, call: AttentionCall, key: Tensor | None, value: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Keys and values `[B, num_kv_heads, S, dh]`, of the projected ones and the cache."""
        if call.cache is not None:
            self.prepare_cache(call.cache)  # before a plain layer takes the first keys
            spread_open_keys(call.cache, self.layer_idx, cross=self.is_cross_attention)
        if key is None:
            layer = self._cache(call).layers[self.layer_idx]
            # an offloaded cache brings back only the layers that are updated
            device = call.hidden_states.device
            return layer.keys.to(device), layer.values.to(device)
        shape = (self.num_kv_heads, self.head_dim)
        key, value = (torch.unflatten(x, -1, shape).transpose(1, 2) for x in (key, value))
        if call.cache is not None:
            check_held_keys(self._cache(call), self.layer_idx, key)
            key, value = self._cache(call).update(key, value, self.layer_idx)
            self._note_updated(call)
        return key, value

    def _use(self, call: AttentionCall, gates: AttentionGates) -> AttentionUse:
        """What this call makes use of; a cache counts its keys."""
        past = None
        if call.cache is not None:
            layer = gated_layer(call.cache, self.layer_idx, cross=self.is_cross_attention)
            if gates.kv is None:
                past = layer.counted("keys")
            else:
                past = layer.count("keys", used_and_full(gates.kv, call.kv_mask))
        return AttentionUse(
            self.cost, self.is_causal, gates.query, gates.kv, past, call.padding_mask, call.kv_mask
        )
