"""How attention experts start from the heads of a pretrained layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from hf_moa.pretrained_weights import AttentionWeights


def convert_attention(weights: AttentionWeights, config: Any) -> AttentionWeights:
    """Expert i starts from head `i % h`; the one head of keys and values is the mean of the source's.

    The experts' output projections are k times as large: the weights of the k active ones sum to 1, not
    to k.
    """
    heads = weights.num_heads
    experts = [i % heads for i in range(config.attention_experts)]

    def of_experts(tensor: Tensor) -> Tensor:
        """`[h * dh, ...]` -> `[N, dh, ...]`."""
        return tensor.unflatten(0, (heads, -1))[experts]

    def mean(tensor: Tensor) -> Tensor:
        """`[h * dh, ...]` -> `[dh, ...]`."""
        return tensor.unflatten(0, (heads, -1)).mean(dim=0)

    def of_bias(change: Callable[[Tensor], Tensor], bias: Tensor | None) -> Tensor | None:
        return None if bias is None else change(bias)

    position_bias = weights.position_bias
    return replace(
        weights,
        query=of_experts(weights.query),
        query_bias=of_bias(of_experts, weights.query_bias),
        key=mean(weights.key),
        key_bias=of_bias(mean, weights.key_bias),
        value=mean(weights.value),
        value_bias=of_bias(mean, weights.value_bias),
        output=(of_experts(weights.output) * config.num_attention_heads).contiguous(),
        position_bias=None if position_bias is None else position_bias[:, experts],
    )
