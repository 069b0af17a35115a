"""Llama's layers, gated: its parameter names, rotations, and keys that several queries share."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, apply_rotary_pos_emb

from hf_moa.modeling.attention.build import mixture_and_gates
from hf_moa.modeling.attention.flow import AttentionFlow
from hf_moa.modeling.cache.naming import takes_cache_by_any_name
from hf_moa.modeling.core.records import LayerRecord
from hf_moa.modeling.feed_forward.layers import (
    build_feed_forward,
    build_feed_forward_gate,
    gated_dense,
)
from hf_moa.modeling.mae.gate_phase import only_gates_learn_in_gate_phase


class MoaLlamaAttention(AttentionFlow):
    output_projection = "o_proj"

    def __init__(self, config, layer_idx):
        d, kind = config.hidden_size, {"is_causal": True, "is_cross_attention": False}
        parts = mixture_and_gates(
            config,
            hidden_size=d,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            gates_are_causal=True,
            output_dropout=0.0,
            norm=partial(LlamaRMSNorm, eps=config.rms_norm_eps),
            **kind,
        )
        super().__init__(
            hidden_size=d,
            attention_dropout=config.attention_dropout,
            rotate=apply_rotary_pos_emb,
            layer_idx=layer_idx,
            **kind,
            **parts,
        )
        self.config = config
        linear = partial(nn.Linear, bias=config.attention_bias)
        self.q_proj = self.mixture.make_query(linear, d, bias=config.attention_bias)
        self.k_proj = linear(d, self.num_kv_heads * self.head_dim)
        self.v_proj = linear(d, self.num_kv_heads * self.head_dim)
        self.o_proj = self.mixture.make_output(linear, d, bias=config.attention_bias)

    @property
    def attn_implementation(self):
        return self.config._attn_implementation

    def project_query(self, hidden_states, mix):
        return self.mixture.query(self.q_proj, hidden_states, mix)

    def project_key_value(self, source):
        return self.k_proj(source), self.v_proj(source)

    @property
    def head_projections(self):
        return (self.q_proj, 0), (self.k_proj, 0), (self.v_proj, 0)

    def forward(self, hidden_states, *args, **kwargs):
        attended = self.attend(hidden_states, *args, **kwargs)
        return self.output(self.o_proj, attended), attended.attentions, attended.record


class MoaLlamaMLP(LlamaMLP):
    def __init__(self, config):
        super().__init__(config)
        self.gate = build_feed_forward_gate(
            config,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            is_gated=True,
        )

    def forward(self, hidden_states, padding_mask=None, budget=None):
        return gated_dense(
            hidden_states,
            padding_mask,
            up=[self.gate_proj, self.up_proj],
            activation=lambda x, factor: self.act_fn(x) * factor,
            down=self.down_proj,
            gate=self.gate,
            budget=budget,
        )


class MoaLlamaDecoderLayer(GradientCheckpointingLayer):
    mae_phase = "mixture"

    def __init__(self, config, layer_idx):
        super().__init__()
        norm = partial(LlamaRMSNorm, eps=config.rms_norm_eps)
        self.self_attn = MoaLlamaAttention(config, layer_idx)
        mlp = build_feed_forward(
            config,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            activation=config.hidden_act,
            norm=norm,
            is_gated=True,
            bias=config.mlp_bias,
        )
        self.mlp = MoaLlamaMLP(config) if mlp is None else mlp
        self.input_layernorm = norm(config.hidden_size)
        self.post_attention_layernorm = norm(config.hidden_size)

    @takes_cache_by_any_name
    @only_gates_learn_in_gate_phase
    def forward(self, hidden_states, attention_mask=None, padding_mask=None, budget=None, **kwargs: Any):
        y, _, record = self.self_attn(
            self.input_layernorm(hidden_states),
            attention_mask,
            padding_mask=padding_mask,
            budget=budget,
            **kwargs,
        )
        hidden_states = hidden_states + y
        y, of_mlp = self.mlp(self.post_attention_layernorm(hidden_states), padding_mask, budget)
        return hidden_states + y, LayerRecord(record, None, of_mlp)
