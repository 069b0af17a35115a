"""Which feed-forward layer a gating configuration asks for, for any backbone."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.activations import ACT2FN

from .cct_feed_forward import FeedForwardGate, GatedFeedForward
from .moe import SparseMoeFeedForward


class DenseFeedForward(nn.Module):
    """`W2 act(W1 x + b1) + b2`: one part of a CCT feed-forward layer."""

    def __init__(self, *, hidden_size: int, intermediate_size: int, activation: str):
        super().__init__()
        self.up = nn.Linear(hidden_size, intermediate_size)
        self.activation = ACT2FN[activation]
        self.down = nn.Linear(intermediate_size, hidden_size)

    def forward(
        self, hidden_states: Tensor, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        return self.down(self.activation(self.up(hidden_states))), {}


def build_feed_forward(
    config, *, hidden_size: int, intermediate_size: int, activation: str, norm_eps: float
) -> nn.Module | None:
    """A module `(x, padding_mask) -> (y, record)`, or None for the backbone's own dense layer.

    The backbone keeps its own where experts and the paper's LayerNorms leave its matrices whole;
    with CCT it then gates them with `build_feed_forward_gate`.
    """
    num_parts = config.cct_num_ffn_splits if config.has_cct else 1
    sizes = {
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size // num_parts,
        "activation": activation,
    }

    def part() -> nn.Module:
        if config.ffn_type == "dense":
            return DenseFeedForward(**sizes)
        return SparseMoeFeedForward(
            config,
            num_experts=config.num_ffn_experts,
            num_selected=config.num_ffn_experts_per_token,
            router_type=config.router_type,
            **sizes,
        )

    if not config.has_cct:
        return part() if config.ffn_type == "moe" else None
    if config.ffn_type == "dense" and not config.cct_sublayer_norm:
        return None
    return GatedFeedForward(
        [part() for _ in range(num_parts)],
        build_feed_forward_gate(config, hidden_size=hidden_size, intermediate_size=intermediate_size),
        hidden_size=hidden_size,
        sublayer_norm=config.cct_sublayer_norm,
        norm_eps=norm_eps,
    )


def build_feed_forward_gate(config, *, hidden_size: int, intermediate_size: int) -> FeedForwardGate:
    """CCT's gates of a feed-forward layer."""
    active = config.num_ffn_experts_per_token if config.ffn_type == "moe" else 1
    return FeedForwardGate(
        hidden_size=hidden_size,
        gate_hidden_size=config.cct_gate_hidden_size,
        num_splits=config.cct_num_ffn_splits,
        part_cost=2 * hidden_size * active * intermediate_size // config.cct_num_ffn_splits,
        starts_open=not config.cct_sublayer_norm,
    )
