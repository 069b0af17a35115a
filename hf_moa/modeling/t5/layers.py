"""T5's layers, gated: its parameter names, RMS norms without bias, and relative position bias."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.t5.modeling_t5 import (
    T5DenseActDense,
    T5DenseGatedActDense,
    T5LayerNorm,
)

from ..attention.build import mixture_and_gates, output_dropout
from ..attention.flow import AttentionFlow
from ..attention.position_bias import relative_position_bias
from ..cache.naming import takes_cache_by_any_name
from ..core.activations import build_activation
from ..core.precision import in_dtype_of
from ..core.records import LayerRecord, Record
from ..feed_forward.layers import build_feed_forward, build_feed_forward_gate, gated_dense
from ..mae.gate_phase import only_gates_learn_in_gate_phase
from .configuration import MoaT5Config


class MoaT5Attention(AttentionFlow):
    """T5's attention: `q`, `k`, `v` and `o`, without biases and without scaling.

    A layer that owns relative position biases, one per head (per expert for MoA), hands them to the
    layers after it.
    """

    output_projection = "o"
    dropout_name = "dropout"

    def __init__(
        self,
        config: MoaT5Config,
        *,
        layer_idx: int,
        is_cross_attention: bool = False,
        has_relative_attention_bias: bool = False,
    ):
        d = config.d_model
        kind: dict[str, Any] = {
            "is_causal": config.is_decoder and not is_cross_attention,
            "is_cross_attention": is_cross_attention,
        }
        super().__init__(
            hidden_size=d,
            scaling=1.0,
            attention_dropout=config.dropout_rate,
            layer_idx=layer_idx,
            **kind,
            **mixture_and_gates(
                config,
                hidden_size=d,
                num_heads=config.num_heads,
                head_dim=config.d_kv,
                gates_are_causal=config.is_decoder,
                output_dropout=config.dropout_rate,
                norm=partial(nn.RMSNorm, eps=config.layer_norm_epsilon),
                **kind,
            ),
        )
        self.config = config
        linear = partial(nn.Linear, bias=False)
        self.q = self.mixture.make_query(linear, d, bias=False)
        self.o = self.mixture.make_output(linear, d, bias=False)
        self.k = linear(d, self.num_kv_heads * self.head_dim)
        self.v = linear(d, self.num_kv_heads * self.head_dim)
        self.has_relative_attention_bias = has_relative_attention_bias
        if has_relative_attention_bias:
            self.relative_attention_bias = nn.Embedding(
                config.relative_attention_num_buckets, self.mixture.num_position_biases
            )

    @property
    def attn_implementation(self) -> str:
        return self.config._attn_implementation

    def project_query(self, hidden_states: Tensor, mix: Any) -> Tensor:
        return self.mixture.query(self.q, hidden_states, mix)

    def project_key_value(self, source: Tensor) -> tuple[Tensor, Tensor]:
        return self.k(source), self.v(source)

    @property
    def head_projections(self) -> tuple[tuple[nn.Module, int], ...]:
        return (self.q, 0), (self.k, 0), (self.v, 0)

    @takes_cache_by_any_name
    def forward(
        self,
        hidden_states: Tensor,
        *args,
        position_bias: Tensor | None = None,
        cache: Cache | None = None,
        **kwargs,
    ) -> tuple[Tensor, Tensor | None, Record, Tensor | None]:
        """What the layer adds, `[B, T, d]`, the attention probabilities (or None), the layer's record,
        and the position bias `[1, heads or N, T, S]` (None in cross-attention)."""
        if self.has_relative_attention_bias:
            position_bias = self._position_bias(hidden_states, cache)
        attended = self.attend(
            hidden_states,
            *args,
            position_bias=position_bias,
            cache=cache,
            **kwargs,
        )
        y = self.output(self.o, attended)
        return y, attended.attentions, attended.record, position_bias

    def _position_bias(self, hidden_states: Tensor, cache: Cache | None) -> Tensor:
        if isinstance(cache, EncoderDecoderCache):
            cache = cache.self_attention_cache
        length = hidden_states.shape[1]
        past, total = 0, length
        if cache is not None:
            past = cache.get_seq_length(self.layer_idx)
            total, _ = cache.get_mask_sizes(length, self.layer_idx)
        return relative_position_bias(
            self.relative_attention_bias,
            length,
            total,
            device=hidden_states.device,
            past=past,
            is_causal=self.config.is_decoder,
            max_distance=self.config.relative_attention_max_distance,
        )


class MoaT5LayerSelfAttention(nn.Module):
    """Norm, self-attention, dropout, residual."""

    def __init__(self, config: MoaT5Config, *, layer_idx: int, has_relative_attention_bias: bool):
        super().__init__()
        self.SelfAttention = MoaT5Attention(
            config, layer_idx=layer_idx, has_relative_attention_bias=has_relative_attention_bias
        )
        self.layer_norm = T5LayerNorm(config.d_model, eps=config.layer_norm_epsilon)
        self.dropout = nn.Dropout(output_dropout(config, config.dropout_rate))

    def forward(self, hidden_states: Tensor, *args, **kwargs) -> tuple[Tensor, Record, Any]:
        y, _, record, position_bias = self.SelfAttention(self.layer_norm(hidden_states), *args, **kwargs)
        return _representable(hidden_states + self.dropout(y)), record, position_bias


class MoaT5LayerCrossAttention(nn.Module):
    """Norm, cross-attention, dropout, residual."""

    def __init__(self, config: MoaT5Config, *, layer_idx: int):
        super().__init__()
        self.EncDecAttention = MoaT5Attention(config, layer_idx=layer_idx, is_cross_attention=True)
        self.layer_norm = T5LayerNorm(config.d_model, eps=config.layer_norm_epsilon)
        self.dropout = nn.Dropout(output_dropout(config, config.dropout_rate))

    def forward(self, hidden_states: Tensor, *args, **kwargs) -> tuple[Tensor, Record]:
        y, _, record, _ = self.EncDecAttention(self.layer_norm(hidden_states), *args, **kwargs)
        return _representable(hidden_states + self.dropout(y)), record


class _GatedDense:
    """A dense layer of T5, its hidden activation gated by CCT."""

    wo: nn.Linear
    dropout: nn.Dropout

    def __init__(self, config: MoaT5Config):
        super().__init__(config)  # type: ignore[call-arg]  # T5's, behind this class
        self.act = build_activation(config.dense_act_fn)
        self.gate = build_feed_forward_gate(
            config,
            hidden_size=config.d_model,
            intermediate_size=config.d_ff,
            is_gated=config.is_gated_act,
        )

    def forward(
        self, hidden_states: Tensor, padding_mask: Tensor | None = None, budget: Any = None
    ) -> tuple[Tensor, Record]:
        return gated_dense(
            hidden_states,
            padding_mask,
            up=self._up(),
            activation=self._activation,
            down=self.wo,
            gate=self.gate,
            budget=budget,
        )

    def _up(self) -> list[nn.Module]:
        """The matrices in front of the activation."""
        raise NotImplementedError

    def _activation(self, x: Tensor, factor: Tensor | None = None) -> Tensor:
        activation = self.act(x) if factor is None else self.act(x) * factor
        return in_dtype_of(self.wo, self.dropout(activation))


class MoaT5DenseActDense(_GatedDense, T5DenseActDense):
    """`wo act(wi x)`."""

    def _up(self) -> list[nn.Module]:
        return [self.wi]


class MoaT5DenseGatedActDense(_GatedDense, T5DenseGatedActDense):
    """`wo (act(wi_0 x) * wi_1 x)`."""

    def _up(self) -> list[nn.Module]:
        return [self.wi_0, self.wi_1]


class MoaT5LayerFF(nn.Module):
    """Norm, feed-forward layer, dropout, residual."""

    def __init__(self, config: MoaT5Config):
        super().__init__()
        layer = build_feed_forward(
            config,
            hidden_size=config.d_model,
            intermediate_size=config.d_ff,
            activation=config.dense_act_fn,
            norm=partial(nn.RMSNorm, eps=config.layer_norm_epsilon),
            is_gated=config.is_gated_act,
            bias=False,
            dropout=config.dropout_rate,
        )
        if layer is None:
            dense = MoaT5DenseGatedActDense if config.is_gated_act else MoaT5DenseActDense
            layer = dense(config)
        self.DenseReluDense = layer
        self.layer_norm = T5LayerNorm(config.d_model, eps=config.layer_norm_epsilon)
        self.dropout = nn.Dropout(config.dropout_rate)

    def forward(
        self, hidden_states: Tensor, padding_mask: Tensor | None = None, budget: Any = None
    ) -> tuple[Tensor, Record]:
        y, record = self.DenseReluDense(self.layer_norm(hidden_states), padding_mask, budget)
        return _representable(hidden_states + self.dropout(y)), record


class MoaT5Block(GradientCheckpointingLayer):
    """One layer: self-attention, in the decoder cross-attention, feed-forward.

    Returns the hidden states `[B, T, d]`, the records of its sub-layers, and the position bias for the
    next layer.
    """

    mae_phase = "mixture"

    def __init__(self, config: MoaT5Config, *, layer_idx: int):
        super().__init__()
        self.is_decoder = config.is_decoder
        self.layer = nn.ModuleList(
            [
                MoaT5LayerSelfAttention(
                    config,
                    layer_idx=layer_idx,
                    has_relative_attention_bias=layer_idx == 0 or config.relative_bias_in_every_layer,
                )
            ]
        )
        if config.is_decoder:
            self.layer.append(MoaT5LayerCrossAttention(config, layer_idx=layer_idx))
        self.layer.append(MoaT5LayerFF(config))

    @takes_cache_by_any_name
    @only_gates_learn_in_gate_phase
    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        position_bias: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Any = None,
        cache: Cache | None = None,
        padding_mask: Tensor | None = None,
        encoder_padding_mask: Tensor | None = None,
        budget: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, LayerRecord, Tensor]:
        cross_record = None
        hidden_states, record, position_bias = self.layer[0](
            hidden_states,
            attention_mask,
            position_bias=position_bias,
            padding_mask=padding_mask,
            cache=cache,
            budget=budget,
            **kwargs,
        )
        if self.is_decoder and encoder_hidden_states is not None:
            hidden_states, cross_record = self.layer[1](
                hidden_states,
                encoder_attention_mask,
                encoder_hidden_states=encoder_hidden_states,
                padding_mask=padding_mask,
                encoder_padding_mask=encoder_padding_mask,
                cache=cache,
                budget=budget,
                **kwargs,
            )
        hidden_states, ffn_record = self.layer[-1](hidden_states, padding_mask, budget)
        return hidden_states, LayerRecord(record, cross_record, ffn_record), position_bias


def _representable(hidden_states: Tensor) -> Tensor:
    """Clamp what float16 cannot hold, as T5 does to train in it."""
    if hidden_states.dtype != torch.float16:
        return hidden_states
    largest = torch.finfo(torch.float16).max
    limit = torch.where(torch.isinf(hidden_states).any(), largest - 1000, largest)
    return torch.clamp(hidden_states, min=-limit, max=limit)
