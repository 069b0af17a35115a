"""BERT's layers, gated: its parameter names and its post-LN (or the papers' pre-LN) layout."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.bert.modeling_bert import BertEmbeddings, BertIntermediate
from transformers.pytorch_utils import apply_chunking_to_forward

from ..attention.gated_attention import AttentionResult
from ..cache.naming import takes_cache_by_any_name
from ..cct.gates import attention_dropouts
from ..cct.sparse_attention import SparseAttention
from ..core.activations import build_activation
from ..feed_forward.layers import build_feed_forward, build_feed_forward_gate, gated_dense
from ..mae.gate_phase import only_gates_learn_in_gate_phase
from ..moa.projections import ExpertInput, ExpertOutput
from .configuration import MoaBertConfig


class MoaBertSelfAttention(SparseAttention):
    """BERT's query, key and value; of an expert each for MoA."""

    def __init__(self, config: MoaBertConfig, *, layer_idx: int, is_cross_attention: bool):
        hidden_size, num_heads = config.hidden_size, config.num_attention_heads
        head_dim = config.attention_head_dim
        super().__init__(
            config,
            hidden_size=hidden_size,
            num_heads=num_heads,
            head_dim=head_dim,
            scaling=head_dim**-0.5,
            attention_dropout=config.attention_probs_dropout_prob,
            output_dropout=config.hidden_dropout_prob,
            is_causal=config.is_decoder and not is_cross_attention,
            is_cross_attention=is_cross_attention,
            gates_are_causal=config.is_decoder,
            layer_idx=layer_idx,
            norm=partial(nn.LayerNorm, eps=config.layer_norm_eps),
        )
        if self.is_moa:
            self.query = ExpertInput(
                num_experts=config.attention_experts,
                in_features=hidden_size,
                out_features=head_dim,
            )
        else:
            self.query = nn.Linear(hidden_size, num_heads * head_dim)
        self.key = nn.Linear(hidden_size, self.num_kv_heads * head_dim)
        self.value = nn.Linear(hidden_size, self.num_kv_heads * head_dim)

    def project_query(self, hidden_states: Tensor, mix: Any) -> Tensor:
        return self.mixture.query(self.query, hidden_states, mix)

    def project_key_value(self, source: Tensor) -> tuple[Tensor, Tensor]:
        return self.key(source), self.value(source)


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

    def forward(self, update: Tensor, hidden_states: Tensor) -> Tensor:
        """The layer's stream with the sub-layer's `update` added."""
        hidden_states = self.dropout(update) + hidden_states
        return hidden_states if self.pre_norm else self.LayerNorm(hidden_states)


class MoaBertAttention(nn.Module):
    """One attention sub-layer: `self` attends, `output` projects and adds to the stream."""

    output_projection = "output.dense"

    def __init__(self, config: MoaBertConfig, *, layer_idx: int, is_cross_attention: bool = False):
        super().__init__()
        self.self = MoaBertSelfAttention(
            config, layer_idx=layer_idx, is_cross_attention=is_cross_attention
        )
        if config.attention_type == "moa":
            dense = ExpertOutput(
                num_experts=config.attention_experts,
                in_features=config.attention_head_dim,
                out_features=config.hidden_size,
            )
        else:
            dense = nn.Linear(config.hidden_size, config.hidden_size)
        _, dropout = attention_dropouts(config, config.hidden_dropout_prob)
        self.output = MoaBertSublayerOutput(config, dense, dropout=dropout)

    def forward(self, hidden_states: Tensor, *args, **kwargs) -> tuple[Tensor, dict[str, Any]]:
        result: AttentionResult = self.self(self.output.before(hidden_states), *args, **kwargs)
        update = self.self.update(self.output.dense, result)
        return self.output(update, hidden_states), result.record


class MoaBertLayer(GradientCheckpointingLayer):
    """One layer: self-attention, cross-attention where the model has it, feed-forward.

    Returns the hidden states `[B, T, d]` and the records of its sub-layers by name.
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
        sizes = {
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
        encoder_attention_mask: Any = None,
        cache: Cache | None = None,
        padding_mask: Tensor | None = None,
        encoder_padding_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, dict[str, dict[str, Any]]]:
        records = {}
        hidden_states, records["self"] = self.attention(
            hidden_states,
            attention_mask,
            padding_mask=padding_mask,
            cache=cache,
            **kwargs,
        )
        if self.is_decoder and encoder_hidden_states is not None:
            if not hasattr(self, "crossattention"):
                raise ValueError(
                    "encoder_hidden_states need cross-attention layers: set add_cross_attention=True "
                    "in the config."
                )
            hidden_states, records["cross"] = self.crossattention(
                hidden_states,
                encoder_attention_mask,
                encoder_hidden_states=encoder_hidden_states,
                padding_mask=padding_mask,
                encoder_padding_mask=encoder_padding_mask,
                cache=cache,
                **kwargs,
            )
        hidden_states, records["ffn"] = self._feed_forward(hidden_states, padding_mask)
        return hidden_states, records

    def _feed_forward(
        self, hidden_states: Tensor, padding_mask: Tensor | None
    ) -> tuple[Tensor, dict[str, Any]]:
        x = self.output.before(hidden_states)
        if self.feed_forward is not None:
            update, record = self.feed_forward(x, padding_mask)
        elif self.feed_forward_gate is None:
            # chunks of the sequence, where the config asks for them
            record = {}
            update = apply_chunking_to_forward(self._dense, self.chunk_size_feed_forward, 1, x)
        else:
            update, record = gated_dense(
                x,
                padding_mask,
                up=[self.intermediate.dense],
                activation=self.intermediate.intermediate_act_fn,
                down=self.output.dense,
                gate=self.feed_forward_gate,
            )
        return self.output(update, hidden_states), record

    def _dense(self, hidden_states: Tensor) -> Tensor:
        return self.output.dense(self.intermediate(hidden_states))


class MoaBertEncoder(nn.Module):
    """The stack of layers, and the last LayerNorm of the pre-LN layout."""

    def __init__(self, config: MoaBertConfig):
        super().__init__()
        self.layer = nn.ModuleList(
            MoaBertLayer(config, layer_idx) for layer_idx in range(config.num_hidden_layers)
        )
        if config.pre_norm:
            self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, hidden_states: Tensor, *args, **kwargs) -> tuple[Tensor, list[dict]]:
        records = []
        for layer in self.layer:
            hidden_states, record = layer(hidden_states, *args, **kwargs)
            records.append(record)
        if hasattr(self, "LayerNorm"):
            hidden_states = self.LayerNorm(hidden_states)
        return hidden_states, records


class MoaBertEmbeddings(BertEmbeddings):
    """BERT's embeddings, with CCT's control symbol added to every token's."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        control_symbol: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        if inputs_embeds is None:
            inputs_embeds = self.word_embeddings(input_ids)
        if control_symbol is not None:
            inputs_embeds = inputs_embeds + control_symbol
        return super().forward(inputs_embeds=inputs_embeds, **kwargs)
