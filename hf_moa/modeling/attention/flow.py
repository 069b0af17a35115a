"""The flow of every gated attention layer: route, project, attend, mix.

    mix        = route(x)                                  which heads a token uses, with what weight
    q, k, v    = project(x)                                under the backbone's own names
    context    = softmax(q k^T * scaling + bias) v
    y          = output(context, mix)

`AttentionFlow` knows neither a backbone nor how a mixture decides. A subclass supplies the projections:
`GatedAttention` under names of its own, a backbone's layer under the backbone's. A mixture
(`multi_head.py`, `mae/mixture.py`, `moa/mixture.py`) says how tokens become queries and how heads become
the output. Where tokens may be skipped (`cct/attention.py`), their gates take over between `route` and
the output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..cache.naming import PAGED_CACHE, takes_cache_by_any_name
from ..cache.paged import with_paged_keys
from ..cache.place import CachePlace
from ..core.macs import Macs
from ..core.one_token import IMPLEMENTATIONS, OneToken
from ..core.records import Record
from .functions import GroupedQueries, eager_attention_forward
from .multi_head import MultiHead
from .servers import SERVERS, refuse_in_server

Rotation = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class AttentionCall(NamedTuple):
    """What an attention layer is called with; see `AttentionFlow.attend`.

    Attributes:
        source: `[B, S, d]`, the tokens that keys and values are projected from; None where they are
            cached.
        kv_mask: `[B, S]` bool, the real ones of them; None for all.
        place: the layer's in the cache, if there is one.
        budget: the call's, for the gates; None without.
        kwargs: for the attention implementation.
        token: the one of `source` that `hidden_states` `[B, 1, d]` are of; None for all.
    """

    hidden_states: Tensor
    source: Tensor | None
    attention_mask: Any
    position_bias: Tensor | None
    position_embeddings: tuple[Tensor, Tensor] | None
    padding_mask: Tensor | None
    kv_mask: Tensor | None
    place: CachePlace | None
    budget: Any
    kwargs: dict[str, Any]
    token: OneToken | None = None

    def of_token(self, token: OneToken, *, is_causal: bool) -> AttentionCall:
        """The call of self-attention for one token, which attends to all that it sees."""
        mask = self.attention_mask
        if mask is not None:
            mask = token.of_pairs(mask)
        elif is_causal:
            mask = token.mask_up_to(self.hidden_states.device)
        return self._replace(
            hidden_states=token.gather(self.hidden_states),
            attention_mask=mask,
            position_bias=None if self.position_bias is None else token.of_pairs(self.position_bias),
            padding_mask=None if self.padding_mask is None else token.gather(self.padding_mask),
            token=token,
        )

    @property
    def all_tokens(self) -> Tensor:
        """`[B, T, d]`, those that `hidden_states` may be one of."""
        if self.token is None or self.source is None:
            return self.hidden_states
        return self.source

    @property
    def is_paged(self) -> bool:
        """Whether this is continuous batching: requests side by side in one sequence, and a cache of
        which all of them have pages."""
        return self.kwargs.get(PAGED_CACHE) is not None


class Attended(NamedTuple):
    """What attention gives before its output projection.

    Attributes:
        context: `[B, T, heads, dh]`; of some tokens only, `[1, n, heads, dh]`. In inference the
            projection may change it in place.
        attentions: `[B, heads, T, S]` where the implementation gives them, else None.
        mix: the mixture's decision for these tokens.
        record: what the layer reports.
        subset: what was computed, where not all was: the tokens, or the heads.
    """

    context: Tensor
    attentions: Tensor | None
    mix: Any
    record: Record
    subset: Any = None


class AttentionFlow(nn.Module):
    """Attention whose heads are a mixture and whose tokens may be skipped.

    A subclass registers its projections, implements `project_query` and `project_key_value`, and calls
    `attend` and `output`.

    Args:
        hidden_size: d.
        mixture: the heads: `MultiHead`, `MixtureOfHeads`, `MixtureOfAttentionExperts` or a subclass.
        num_kv_heads: heads of keys and values, a divisor of the mixture's heads; default: as many.
        gates: what decides which tokens are skipped, such as `cct.attention.AttentionGates`; None
            computes all.
        scaling: factor of the scores; default: `head_dim ** -0.5`.
        attention_dropout: dropout on the attention probabilities.
        is_causal: self-attention that sees no later token.
        is_cross_attention: keys and values come from other tokens.
        window: in causal self-attention, the tokens that a query sees, itself included; None for all.
            It takes effect in masks: `GatedAttention` makes one, a backbone makes its own.
        rotate: `(query, key, cos, sin) -> (query, key)`, of `[B, heads, T, dh]` and position embeddings
            `[B, T, dh]`, such as transformers' `apply_rotary_pos_emb`; None rotates nothing.
        layer_idx: of the cache.

    Raises:
        ValueError: a number of heads that the mixture cannot have; a rotation in cross-attention; a
            window elsewhere than in causal self-attention, or with gates, whose costs know none.
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        mixture: MultiHead,
        num_kv_heads: int | None = None,
        gates: nn.Module | None = None,
        scaling: float | None = None,
        attention_dropout: float = 0.0,
        is_causal: bool = False,
        is_cross_attention: bool = False,
        window: int | None = None,
        rotate: Rotation | None = None,
        layer_idx: int = 0,
    ):
        super().__init__()
        self.hidden_size = hidden_size
        self.num_heads, self.head_dim = mixture.num_heads, mixture.head_dim
        self.num_kv_heads = _kv_heads(mixture, num_kv_heads)
        self.scaling = self.head_dim**-0.5 if scaling is None else scaling
        self.add_module(self.dropout_name, nn.Dropout(attention_dropout))
        self.is_causal = is_causal
        self.is_cross_attention = is_cross_attention
        self.window = window
        self.rotate = rotate
        self.layer_idx = layer_idx
        self.mixture = mixture
        self.cct = gates  # by the name that checkpoints have for it
        if rotate is not None and is_cross_attention:
            raise ValueError("rotate must be None in cross-attention, whose sides have other positions.")
        if window is not None and (not is_causal or gates is not None or window < 1):
            raise ValueError(
                "window must be None, or at least 1 in causal self-attention without gates that skip "
                f"tokens (got {window}, is_causal={is_causal}, gates={type(gates).__name__})."
            )

    # the module whose `p` is the dropout on the attention probabilities, by the backbone's name
    dropout_name = "attention_dropout"

    @property
    def gates(self) -> Any:
        """What decides which tokens are skipped; None where none are."""
        return self.cct

    @property
    def attn_implementation(self) -> str:
        """The implementation of attention, as transformers calls it."""
        return "sdpa"

    def attention_function(self) -> Callable:
        """That implementation."""
        return ALL_ATTENTION_FUNCTIONS.get_interface(self.attn_implementation, eager_attention_forward)

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

    @property
    def head_projections(self) -> tuple[tuple[nn.Module, int], ...]:
        """Of queries, keys and values: the linear layer, and the first of its outputs that is one of
        theirs."""
        raise NotImplementedError

    def output(self, linear: nn.Module, attended: Attended) -> Tensor:
        """What the layer adds to the stream, `[B, T, d]`: `linear` is its output projection."""
        if attended.subset is not None:
            return self.gates.output(self, linear, attended)
        return self.mixture.output(linear, attended.context, attended.mix)

    @takes_cache_by_any_name
    def attend(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        *,
        encoder_hidden_states: Tensor | None = None,
        padding_mask: Tensor | None = None,
        encoder_padding_mask: Tensor | None = None,
        position_bias: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        cache: Cache | None = None,
        budget: Any = None,
        token: OneToken | None = None,
        **kwargs: Any,
    ) -> Attended:
        """
        Args:
            hidden_states: `[B, T, d]`.
            attention_mask: what transformers' masking utilities made for the implementation.
            encoder_hidden_states: `[B, S, d]`, in cross-attention.
            padding_mask: `[B, T]` bool, the real ones of these tokens; None for all.
            encoder_padding_mask: `[B, S]` bool, the same of `encoder_hidden_states`.
            position_bias: added to the scores, one for each head that the layer has: `[1, h, T, S]`,
                for MoA `[1, N, T, S]`.
            position_embeddings: cosines and sines for `rotate`, `[B or 1, T, dh]` each.
            cache: the cache, if any.
            budget: what the gates have to know of the call; see `budget_control` of the model.
            token: in self-attention, the only token that attends, as if T were 1; None for all.
            kwargs: handed on to the attention implementation.

        Raises:
            ValueError: continuous batching, or a server, of learned MAE gates; a layer that rotates, and
                no `position_embeddings`, or one token; cross-attention, and neither
                `encoder_hidden_states` nor a cache that holds their keys, or one token; one token under
                an implementation with masks of another kind.
        """
        place = None
        if cache is not None:
            place = CachePlace(cache, self.layer_idx, self.is_cross_attention)
        source: Tensor | None = hidden_states
        if self.is_cross_attention:
            is_held = place is not None and place.is_filled
            if encoder_hidden_states is None and not is_held:
                raise ValueError(
                    "encoder_hidden_states must be given to cross-attention until a cache holds their "
                    "keys (got None)."
                )
            source = None if is_held else encoder_hidden_states
        call = AttentionCall(
            hidden_states,
            source,
            attention_mask,
            position_bias,
            position_embeddings,
            padding_mask,
            encoder_padding_mask if self.is_cross_attention else padding_mask,
            place,
            budget,
            kwargs,
        )
        if self.rotate is not None and position_embeddings is None:
            raise ValueError("position_embeddings must be given to a layer that rotates (got None).")
        if call.is_paged:
            self.refuse_packed_requests()
        if self.mixture.sees_other_tokens:
            refuse_in_server(self.attn_implementation)
        mix, record = self.mixture.route(hidden_states, padding_mask, place)
        if token is not None:
            if self.is_cross_attention or self.rotate is not None:
                raise ValueError(
                    "token must be None in cross-attention and in a layer that rotates (got "
                    f"{token.position})."
                )
            if self.attn_implementation not in IMPLEMENTATIONS:
                raise ValueError(
                    f"attn_implementation must be of {', '.join(IMPLEMENTATIONS)} where one token is "
                    f"asked for (got {self.attn_implementation!r}): use set_attn_implementation."
                )
            call, mix = call.of_token(token, is_causal=self.is_causal), self.mixture.take(mix, token)
        if self.gates is not None:
            return self.gates.attend(self, call, mix, record)
        query, key, value = self.project(call.hidden_states, source, mix)
        query, key, value = self.with_cached(call, query, key, value)
        context, attentions = self.attend_to(call, query, key, value, mix)
        return Attended(context, attentions, mix, record)

    def refuse_packed_requests(self) -> None:
        """Raise a ValueError where gates remember earlier tokens of one sequence."""
        if self.mixture.remembers:
            raise ValueError(
                "Learned MAE gates cannot tell apart the requests that continuous batching packs into "
                "one sequence (got a paged cache): use generate instead of generate_batch."
            )

    def with_cached(
        self, call: AttentionCall, query: Tensor, key: Tensor | None, value: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries `[B, T, heads, dh]`, and keys and values `[B, num_kv_heads, S, dh]`, of the projected
        ones and those in the cache. They are rotated, where the call has position embeddings."""
        if call.place is not None:
            self.prepare_cache(call.place.cache)  # before a plain layer takes the first keys
        if key is None or value is None:
            held = call.place.held  # type: ignore[union-attr]  # what is not projected is in a cache
            return query, *held(call.hidden_states.device)
        shape = (-1, self.head_dim)
        key, value = (torch.unflatten(x, -1, shape).transpose(1, 2) for x in (key, value))
        if self.rotate is not None and call.position_embeddings is not None:
            query, key = self.rotate(query.transpose(1, 2), key, *call.position_embeddings)
            query = query.transpose(1, 2)
        if call.place is not None:
            key, value = call.place.update(key, value)
        return query, key, value

    def attend_to(
        self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, mix: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of `[B, T, heads, dh]` to `[B, num_kv_heads, S, dh]`: contexts
        `[B, T, heads, dh]`, and the probabilities where the implementation gives them."""
        attention_mask, position_bias, kwargs = call.attention_mask, call.position_bias, {**call.kwargs}
        batch, length, heads = query.shape[:3]
        groups = heads // key.shape[1]
        layer: Any = self if groups == 1 else GroupedQueries(self, groups)
        if self.window is not None:
            kwargs["sliding_window"] = self.window
        if position_bias is not None:
            position_bias = self.mixture.position_bias(position_bias, mix)
            if self.attn_implementation == "flex_attention":
                position_bias = position_bias.expand(batch, -1, -1, -1)  # it does not broadcast
            kwargs["position_bias"] = position_bias
        if call.is_paged:  # the cache holds the heads of keys, and gives those of earlier calls
            query = query.transpose(1, 2)
            key, value = with_paged_keys(key, value, kwargs, layer_idx=self.layer_idx)
        else:
            query = query.transpose(1, 2)
            if self.num_kv_heads == 1 and heads > 1 and self.attn_implementation not in SERVERS:
                # stride 0: one set of keys serves every head, whatever the implementation
                layer, key, value = self, *(x.expand(-1, heads, -1, -1) for x in (key, value))
        context, attentions = self.attention_function()(
            layer,
            query,
            key,
            value,
            attention_mask,
            dropout=self._dropout_rate() if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        return context.reshape(batch, length, heads, self.head_dim), attentions

    def _dropout_rate(self) -> float:
        """Of the module, which others set to 0, replace or leave in eval."""
        module: Any = getattr(self, self.dropout_name)
        return module.p if isinstance(module, nn.Dropout) and module.training else 0.0

    def prepare_cache(self, cache: Cache) -> None:
        """Make an empty cache able to hold what this layer's gates remember.

        Raises:
            ValueError: it is of a kind that cannot.
        """
        place = CachePlace(cache, self.layer_idx, self.is_cross_attention)
        self.mixture.prepare_cache(place)
        if self.gates is not None:
            self.gates.prepare_cache(place)

    def spread_over(self, ranks: Any) -> None:
        """Compute only this rank's heads; its projections have become those of these heads.

        Raises:
            ValueError: the ranks cannot have equal parts of the heads, or the gates cannot be shared.
        """
        self.num_heads, self.num_kv_heads = self.mixture.spread_over(ranks, self.num_kv_heads)
        if self.gates is not None:
            self.gates.spread_over(ranks)

    def count_macs(self, x: Tensor, *args: Any, **kwargs: Any) -> Macs:
        """Scores and weighted values."""
        length = x.shape[1]
        source = kwargs.get("encoder_hidden_states")
        keys = length if source is None else source.shape[1]
        pairs = length * (length + 1) // 2 if self.is_causal else length * keys
        if (token := kwargs.get("token")) is not None:
            pairs = token.position + 1 if self.is_causal and isinstance(token.position, int) else keys
            length = 1
        if self.window is not None and self.window < length:
            pairs -= (length - self.window) * (length - self.window + 1) // 2
        macs = 2 * pairs * self.num_heads * self.head_dim
        skippable = 0 if self.gates is None else self.gates.count_skippable(length, keys, pairs)
        return Macs(macs, macs, skippable)


def _kv_heads(mixture: MultiHead, asked: int | None) -> int:
    """How many heads of keys and values a layer has."""
    fixed, heads = mixture.num_kv_heads, mixture.num_heads
    if fixed is not None and asked not in (None, fixed):
        raise ValueError(
            f"num_kv_heads must be {fixed} with a {type(mixture).__name__}, whose heads share their "
            f"keys (got {asked})."
        )
    found = fixed or (heads if asked is None else asked)
    if found < 1 or heads % found:
        raise ValueError(f"num_kv_heads must divide the number of heads, {heads} (got {asked}).")
    return found
