"""BERT's layers, gated: its parameter names and its post-LN (or the papers' pre-LN) layout."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.bert.modeling_bert import BertIntermediate
from transformers.pytorch_utils import apply_chunking_to_forward

from ..attention.build import check_cross_attention, mixture_and_gates, output_dropout
from ..attention.flow import Attended, AttentionFlow
from ..attention.position_bias import relative_position_bias
from ..cache.naming import takes_cache_by_any_name
from ..core.activations import build_activation
from ..core.budgets import layers_at
from ..core.one_token import OneToken, of_token
from ..core.records import LayerRecord, Record
from ..feed_forward.layers import build_feed_forward, build_feed_forward_gate, gated_dense
from ..mae.gate_phase import only_gates_learn_in_gate_phase
from .configuration import MoaBertConfig


class MoaBertSelfAttention(AttentionFlow):
    """BERT's query, key and value; of an expert each for MoA."""

    dropout_name = "dropout"

    def __init__(self, config: MoaBertConfig, *, layer_idx: int, is_cross_attention: bool):
        kind: dict[str, Any] = {
            "is_causal": config.is_decoder and not is_cross_attention,
            "is_cross_attention": is_cross_attention,
        }
        super().__init__(
            hidden_size=config.hidden_size,
            attention_dropout=config.attention_probs_dropout_prob,
            layer_idx=layer_idx,
            **kind,
            **mixture_and_gates(
                config,
                hidden_size=config.hidden_size,
                num_heads=config.num_attention_heads,
                head_dim=config.head_dim,  # type: ignore[arg-type]  # a number
                gates_are_causal=config.is_decoder,
                output_dropout=config.hidden_dropout_prob,
                norm=partial(nn.LayerNorm, eps=config.layer_norm_eps),
                **kind,
            ),
        )
        self.config = config
        self.query = self.mixture.make_query(nn.Linear, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, self.num_kv_heads * self.head_dim)
        self.value = nn.Linear(config.hidden_size, self.num_kv_heads * self.head_dim)

    @property
    def attn_implementation(self) -> str:
        return self.config._attn_implementation

    def project_query(self, hidden_states: Tensor, mix: Any) -> Tensor:
        return self.mixture.query(self.query, hidden_states, mix)

    def project_key_value(self, source: Tensor) -> tuple[Tensor, Tensor]:
        return self.key(source), self.value(source)

    @property
    def head_projections(self) -> tuple[tuple[nn.Module, int], ...]:
        return (self.query, 0), (self.key, 0), (self.value, 0)

    def forward(self, *args: Any, **kwargs: Any) -> Attended:
        """Attention before its output projection, which is in another module; see `attend`."""
        return self.attend(*args, **kwargs)


class MoaBertSublayerOutput(nn.Module):
    """Dropout, residual and LayerNorm around a sub-layer; under BERT's names.

    Args:
        config: a `MoaBertConfig`.
        dense: the sub-layer's last projection; None where the sub-layer brings its own.
        dropout: its rate.
    """

    def __init__(self, config: MoaBertConfig, dense: nn.Module | None, *, dropout: float):
        super().__init__()
        self.pre_norm = config.pre_norm
        if dense is not None:
            self.dense = dense
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(dropout)

    def before(self, hidden_states: Tensor) -> Tensor:
        """The sub-layer's input."""
        return self.LayerNorm(hidden_states) if self.pre_norm else hidden_states

    def forward(self, y: Tensor, hidden_states: Tensor) -> Tensor:
        """The layer's stream with `y`, what the sub-layer gives, added."""
        hidden_states = self.dropout(y) + hidden_states
        return hidden_states if self.pre_norm else self.LayerNorm(hidden_states)


class MoaBertAttention(nn.Module):
    """One attention sub-layer: `self` attends, `output` projects and adds to the stream."""

    output_projection = "output.dense"

    def __init__(self, config: MoaBertConfig, *, layer_idx: int, is_cross_attention: bool = False):
        super().__init__()
        self.self = MoaBertSelfAttention(
            config, layer_idx=layer_idx, is_cross_attention=is_cross_attention
        )
        dense = self.self.mixture.make_output(nn.Linear, config.hidden_size)
        dropout = output_dropout(config, config.hidden_dropout_prob)
        self.output = MoaBertSublayerOutput(config, dense, dropout=dropout)

    def forward(
        self, hidden_states: Tensor, *args, token: OneToken | None = None, **kwargs
    ) -> tuple[Tensor, Record]:
        x = self.output.before(hidden_states)
        attended: Attended = self.self(x, *args, token=token, **kwargs)
        y = self.self.output(self.output.dense, attended)
        return self.output(y, of_token(token, hidden_states)), attended.record


class MoaBertLayer(GradientCheckpointingLayer):
    """One layer: self-attention, cross-attention where the model has it, feed-forward.

    Returns the hidden states `[B, T, d]`, of one token `[B, 1, d]`, and the records of its sub-layers.
    """

    mae_phase = "mixture"

    def __init__(self, config: MoaBertConfig, layer_idx: int):
        super().__init__()
        self.chunk_size_feed_forward = config.chunk_size_feed_forward
        self.is_decoder = config.is_decoder
        self.attention = MoaBertAttention(config, layer_idx=layer_idx)
        if config.add_cross_attention:
            if not config.is_decoder:
                raise ValueError(
                    "MoaBertConfig.is_decoder must be True where add_cross_attention is (got False)."
                )
            self.crossattention = MoaBertAttention(config, layer_idx=layer_idx, is_cross_attention=True)
        sizes: dict[str, Any] = {
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
        }
        self.feed_forward = build_feed_forward(
            config,
            activation=config.hidden_act,
            norm=partial(nn.LayerNorm, eps=config.layer_norm_eps),
            **sizes,
        )
        if self.feed_forward is not None:
            self.output = MoaBertSublayerOutput(config, None, dropout=config.hidden_dropout_prob)
            return
        self.intermediate = BertIntermediate(config)
        self.intermediate.intermediate_act_fn = build_activation(config.hidden_act)
        dense = nn.Linear(config.intermediate_size, config.hidden_size)
        self.output = MoaBertSublayerOutput(config, dense, dropout=config.hidden_dropout_prob)
        self.feed_forward_gate = build_feed_forward_gate(config, **sizes)

    @takes_cache_by_any_name
    @only_gates_learn_in_gate_phase
    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        encoder_hidden_states: Tensor | None = None,
        position_bias: Tensor | None = None,
        encoder_attention_mask: Any = None,
        cache: Cache | None = None,
        padding_mask: Tensor | None = None,
        encoder_padding_mask: Tensor | None = None,
        budget: Any = None,
        token: OneToken | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, LayerRecord]:
        cross_record = None
        hidden_states, record = self.attention(
            hidden_states,
            attention_mask,
            position_bias=position_bias,
            padding_mask=padding_mask,
            cache=cache,
            budget=budget,
            token=token,
            **kwargs,
        )
        padding_mask = of_token(token, padding_mask)
        if self.is_decoder and encoder_hidden_states is not None:
            check_cross_attention(self)
            hidden_states, cross_record = self.crossattention(
                hidden_states,
                encoder_attention_mask,
                encoder_hidden_states=encoder_hidden_states,
                padding_mask=padding_mask,
                encoder_padding_mask=encoder_padding_mask,
                cache=cache,
                budget=budget,
                **kwargs,
            )
        hidden_states, ffn_record = self._feed_forward(hidden_states, padding_mask, budget)
        return hidden_states, LayerRecord(record, cross_record, ffn_record)

    def _feed_forward(
        self, hidden_states: Tensor, padding_mask: Tensor | None, budget: Any
    ) -> tuple[Tensor, Record]:
        x = self.output.before(hidden_states)
        if self.feed_forward is not None:
            y, record = self.feed_forward(x, padding_mask, budget)
        elif self.feed_forward_gate is None:
            # chunks of the sequence, where the config asks for them
            record = Record()
            chunk_size = self.chunk_size_feed_forward if x.shape[1] > 1 else 0
            y = apply_chunking_to_forward(self._dense, chunk_size, 1, x)
        else:
            y, record = gated_dense(
                x,
                padding_mask,
                up=[self.intermediate.dense],
                activation=self.intermediate.intermediate_act_fn,
                down=self.output.dense,
                gate=self.feed_forward_gate,
                budget=budget,
            )
        return self.output(y, hidden_states), record

    def _dense(self, hidden_states: Tensor) -> Tensor:
        return self.output.dense(self.intermediate(hidden_states))


class MoaBertEncoder(nn.Module):
    """The stack of layers, the biases of distances that they share, where the model has such, and the
    last LayerNorm of the pre-LN layout."""

    def __init__(self, config: MoaBertConfig):
        super().__init__()
        layers = [MoaBertLayer(config, layer_idx) for layer_idx in range(config.num_hidden_layers)]
        self.layer = nn.ModuleList(layers)
        self.relative_attention_bias = None
        if config.relative_attention_num_buckets is not None:
            self.relative_attention_bias = nn.Embedding(
                config.relative_attention_num_buckets,
                layers[0].attention.self.mixture.num_position_biases,
            )
        if config.pre_norm:
            self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any,
        encoder_hidden_states: Tensor | None,
        *,
        token: OneToken | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, list[LayerRecord]]:
        records = []
        position_bias = self._position_bias(hidden_states)
        layers = layers_at(self.layer, kwargs.get("budget"))
        for layer in layers:
            hidden_states, record = layer(
                hidden_states,
                attention_mask,
                encoder_hidden_states,  # positional, with the next: for reentrant gradient checkpointing
                position_bias,
                token=token if layer is layers[-1] else None,
                **kwargs,
            )
            records.append(record)
        if hasattr(self, "LayerNorm"):
            hidden_states = self.LayerNorm(hidden_states)
        return hidden_states, records

    def _position_bias(self, hidden_states: Tensor) -> Tensor | None:
        if self.relative_attention_bias is None:
            return None
        length = hidden_states.shape[1]
        return relative_position_bias(
            self.relative_attention_bias, length, length, device=hidden_states.device
        )
