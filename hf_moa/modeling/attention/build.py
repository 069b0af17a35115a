"""The mixture and the gates of an attention layer, as a configuration asks for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ..core.slots import GATINGS, MIXTURES
from .multi_head import MultiHead


def mixture_and_gates(
    config: Any,
    *,
    hidden_size: int,
    num_heads: int,
    head_dim: int,
    gates_are_causal: bool,
    is_causal: bool,
    is_cross_attention: bool,
    output_dropout: float,
    norm: Callable[[int], nn.Module],
    num_kv_heads: int | None = None,
) -> dict[str, Any]:
    """Arguments of `AttentionFlow`.

    Args:
        config: a `GatingConfig`.
        hidden_size, num_heads, head_dim: d, h (k for MoA) and dh.
        gates_are_causal: MAE gates see no later token: in every layer of a decoder.
        is_causal, is_cross_attention: of the layer.
        output_dropout: the backbone's behind the output projection; see the function of that name.
        norm: makes CCT's extra norms for a width, as the backbone's own are.
        num_kv_heads: heads of keys and values that the backbone has; default: `num_heads`. Experts that
            share theirs have a number of their own.
    """
    mixture = (MIXTURES.of(config) or MultiHead).from_config(
        config,
        hidden_size=hidden_size,
        num_heads=num_heads,
        head_dim=head_dim,
        is_causal=gates_are_causal,
    )
    num_kv_heads = mixture.num_kv_heads or num_kv_heads or num_heads
    gating = GATINGS.of(config)
    gates = None
    if gating is not None:
        gates = gating.attention(
            config,
            mixture,
            hidden_size=hidden_size,
            num_kv_heads=num_kv_heads,
            norm=norm,
            output_dropout=output_dropout,
            is_cross_attention=is_cross_attention,
            is_causal=is_causal,
        )
    return {"mixture": mixture, "gates": gates, "num_kv_heads": num_kv_heads}


def output_dropout(config: Any, rate: float) -> float:
    """Dropout behind the output projection of attention, for a backbone that has `rate` there; 0 where
    the gates have it in front."""
    gating = GATINGS.of(config)
    return rate if gating is None else gating.output_dropout(config, rate)


def check_cross_attention(layer: nn.Module) -> None:
    """Check that a backbone's layer, which is given `encoder_hidden_states`, has `crossattention`.

    Raises:
        ValueError: it has none.
    """
    if not hasattr(layer, "crossattention"):
        raise ValueError(
            "encoder_hidden_states need cross-attention layers: set add_cross_attention=True in the "
            "config."
        )
