"""Which mixture of heads a gating configuration asks for."""

from __future__ import annotations

from torch import nn

from ..mae.mixture import MixtureOfHeads
from ..moa.mixture import MixtureOfAttentionExperts
from .multi_head import MultiHead


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
