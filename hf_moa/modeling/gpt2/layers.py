"""GPT-2's layers, gated: its parameter names, `Conv1D` projections and pre-LN layout."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP
from transformers.pytorch_utils import Conv1D

from ..attention.build import check_cross_attention, mixture_and_gates, output_dropout
from ..attention.flow import AttentionFlow
from ..attention.functions import upcast_attention_forward
from ..cache.naming import takes_cache_by_any_name
from ..core.activations import build_activation
from ..core.linear_slices import linear_slice
from ..core.macs import Macs
from ..core.one_token import OneToken, of_token
from ..core.records import LayerRecord, Record
from ..feed_forward.layers import build_feed_forward, build_feed_forward_gate, gated_dense
from ..mae.gate_phase import only_gates_learn_in_gate_phase
from .configuration import MoaGPT2Config


class MoaGPT2Attention(AttentionFlow):
    """GPT-2's attention: `c_attn` makes queries, keys and values, `c_proj` the output.

    In cross-attention, and where a mixture projects queries in its own way, `c_attn` makes keys and
    values only and `q_attn` the queries. Returns `[B, T, d]`, the attention probabilities (or None) and
    the layer's record.
    """

    output_projection = "c_proj"
    dropout_name = "attn_dropout"

    def __init__(self, config: MoaGPT2Config, *, layer_idx: int, is_cross_attention: bool = False):
        d: int = config.n_embd
        head_dim: Any = config.head_dim
        scaling = head_dim**-0.5 if config.scale_attn_weights else 1.0
        if config.scale_attn_by_inverse_layer_idx:
            scaling /= layer_idx + 1
        kind: dict[str, Any] = {
            "is_causal": not is_cross_attention,
            "is_cross_attention": is_cross_attention,
        }
        super().__init__(
            hidden_size=d,
            scaling=scaling,
            attention_dropout=config.attn_pdrop,
            layer_idx=layer_idx,
            **kind,
            **mixture_and_gates(
                config,
                hidden_size=d,
                num_heads=config.n_head,
                head_dim=head_dim,
                gates_are_causal=True,
                output_dropout=config.resid_pdrop,
                norm=partial(nn.LayerNorm, eps=config.layer_norm_epsilon),
                **kind,
            ),
        )
        self.config = config
        self.is_fused = not is_cross_attention and self.mixture.has_plain_projections
        kv_size = self.num_kv_heads * head_dim
        self.c_attn = Conv1D((3 if self.is_fused else 2) * kv_size, d)
        if not self.is_fused:
            self.q_attn = self.mixture.make_query(_conv1d, d)
        self.c_proj = self.mixture.make_output(_conv1d, d)
        self.resid_dropout = nn.Dropout(output_dropout(config, config.resid_pdrop))

    @property
    def attn_implementation(self) -> str:
        return self.config._attn_implementation

    def project_query(self, hidden_states: Tensor, mix: Any) -> Tensor:
        if self.is_fused:
            query = linear_slice(self.c_attn, hidden_states, 0, 1, of=3)
            return torch.unflatten(query, -1, (-1, self.head_dim))
        return self.mixture.query(self.q_attn, hidden_states, mix)

    def project_key_value(self, source: Tensor) -> tuple[Tensor, Tensor]:
        if self.is_fused:
            key, value = linear_slice(self.c_attn, source, 1, 3, of=3).chunk(2, dim=-1)
        else:
            key, value = self.c_attn(source).chunk(2, dim=-1)
        return key, value

    @property
    def head_projections(self) -> tuple[tuple[nn.Module, int], ...]:
        size = self.num_kv_heads * self.head_dim
        if self.is_fused:
            return (self.c_attn, 0), (self.c_attn, size), (self.c_attn, 2 * size)
        return (self.q_attn, 0), (self.c_attn, 0), (self.c_attn, size)

    def project(
        self, hidden_states: Tensor, source: Tensor | None, mix: Any
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        if not self.is_fused or source is not hidden_states:
            return super().project(hidden_states, source, mix)
        query, key, value = self.c_attn(hidden_states).chunk(3, dim=-1)
        return torch.unflatten(query, -1, (-1, self.head_dim)), key, value

    def forward(self, hidden_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor | None, Record]:
        attended = self.attend(hidden_states, *args, **kwargs)
        y = self.output(self.c_proj, attended)
        return self.resid_dropout(y), attended.attentions, attended.record

    def count_macs(self, x: Tensor, *args: Any, **kwargs: Any) -> Macs:
        macs = super().count_macs(x, *args, **kwargs)
        if kwargs.get("token") is None or not self.is_fused:
            return macs
        # `c_attn` counts itself whole, once for this token's query and once for the keys and values
        kv_size = self.num_kv_heads * self.head_dim
        more = (x.shape[1] + 2) * self.hidden_size * kv_size
        return macs._replace(total=macs.total - more, active=macs.active - more)

    def attention_function(self) -> Callable:
        if self.attn_implementation == "eager" and self.config.reorder_and_upcast_attn:
            return upcast_attention_forward
        return super().attention_function()


class MoaGPT2MLP(GPT2MLP):
    """GPT-2's feed-forward layer, its hidden activation gated by CCT."""

    def __init__(self, config: MoaGPT2Config):
        super().__init__(config.ffn_size, config)
        self.act = build_activation(config.activation_function)
        self.gate = build_feed_forward_gate(
            config, hidden_size=config.n_embd, intermediate_size=config.ffn_size
        )

    def forward(  # type: ignore[override]  # and reports
        self, hidden_states: Tensor, padding_mask: Tensor | None = None, budget: Any = None
    ) -> tuple[Tensor, Record]:
        y, record = gated_dense(
            hidden_states,
            padding_mask,
            up=[self.c_fc],
            activation=self.act,
            down=self.c_proj,
            gate=self.gate,
            budget=budget,
        )
        return self.dropout(y), record


class MoaGPT2Block(GradientCheckpointingLayer):
    """One layer: self-attention, cross-attention where the model has it, feed-forward.

    Returns the hidden states `[B, T, d]`, of one token `[B, 1, d]`, and the records of its sub-layers.
    """

    mae_phase = "mixture"
    mlp: nn.Module
    mlp_dropout: nn.Module

    def __init__(self, config: MoaGPT2Config, layer_idx: int):
        super().__init__()
        norm = partial(nn.LayerNorm, eps=config.layer_norm_epsilon)
        self.ln_1 = norm(config.n_embd)
        self.attn = MoaGPT2Attention(config, layer_idx=layer_idx)
        self.ln_2 = norm(config.n_embd)
        if config.add_cross_attention:
            self.crossattention = MoaGPT2Attention(config, layer_idx=layer_idx, is_cross_attention=True)
            self.ln_cross_attn = norm(config.n_embd)
        mlp = build_feed_forward(
            config,
            hidden_size=config.n_embd,
            intermediate_size=config.ffn_size,
            activation=config.activation_function,
            norm=norm,
        )
        if mlp is None:
            self.mlp, self.mlp_dropout = MoaGPT2MLP(config), nn.Identity()  # which has its own
        else:
            self.mlp, self.mlp_dropout = mlp, nn.Dropout(config.resid_pdrop)

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
        budget: Any = None,
        token: OneToken | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, LayerRecord]:
        cross_record = None
        y, _, record = self.attn(
            self.ln_1(hidden_states),
            attention_mask,
            padding_mask=padding_mask,
            cache=cache,
            budget=budget,
            token=token,
            **kwargs,
        )
        hidden_states = of_token(token, hidden_states) + y
        padding_mask = of_token(token, padding_mask)
        if encoder_hidden_states is not None:
            check_cross_attention(self)
            y, _, cross_record = self.crossattention(
                self.ln_cross_attn(hidden_states),
                encoder_attention_mask,
                encoder_hidden_states=encoder_hidden_states,
                padding_mask=padding_mask,
                encoder_padding_mask=encoder_padding_mask,
                cache=cache,
                budget=budget,
                **kwargs,
            )
            hidden_states = hidden_states + y
        y, ffn_record = self.mlp(self.ln_2(hidden_states), padding_mask, budget)
        return hidden_states + self.mlp_dropout(y), LayerRecord(record, cross_record, ffn_record)


def _conv1d(size_in: int, size_out: int) -> Conv1D:
    return Conv1D(size_out, size_in)
