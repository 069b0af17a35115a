"""How dense weights become the weights of experts, whatever the backbone calls them."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from .modeling.config.gating import GatingConfig


def matching(state: dict[str, Tensor], pattern: str) -> list[str]:
    """The first groups of the names that match `pattern` in full."""
    return [match[1] for name in state if (match := re.fullmatch(pattern, name))]


def query_experts(query: Tensor, *, num_heads: int, config: GatingConfig) -> Tensor:
    """Queries `[h * dh, ...]` as the N experts' `[N, dh, ...]`: expert i is head `i % h`."""
    return _per_head(query, num_heads)[heads_of_experts(num_heads, config)]


def output_experts(output: Tensor, *, num_heads: int, config: GatingConfig) -> Tensor:
    """An output projection `[h * dh, d]` (transposed, as `x @ W`) as the experts' `[N, dh, d]`.

    Times k: the weights of the k active experts sum to 1, not to k.
    """
    experts = _per_head(output, num_heads)[heads_of_experts(num_heads, config)]
    return (experts * config.num_attention_heads).contiguous()


def mean_over_heads(tensor: Tensor, *, num_heads: int) -> Tensor:
    """Keys or values `[h * dh, ...]` as the one head that all experts share, `[dh, ...]`."""
    return _per_head(tensor, num_heads).mean(dim=0)


def heads_of_experts(num_heads: int, config: GatingConfig) -> list[int]:
    """The head that each expert starts from."""
    return [i % num_heads for i in range(config.attention_experts)]


def feed_forward_experts(
    config: GatingConfig,
    *,
    up: Tensor,
    down: Tensor,
    linear: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> dict[str, Tensor]:
    """A dense layer as a mixture's experts, each a copy of it; with CCT, of its slice of the layer.

    Args:
        config: says how many experts, and how many slices.
        up, down: `[ff, d]` and `[d, ff]`.
        linear: `[ff, d]`, what the activation is multiplied with, where there is such a thing.
        up_bias, down_bias: `[ff]` and `[d]`, where there are any.

    Returns:
        Parameters by name, below the name of the feed-forward layer.
    """
    num_parts = config.cct_num_ffn_splits if config.has_cct else 1
    parameters = {}
    for m in range(num_parts):
        part = {"down_proj": down.chunk(num_parts, dim=1)[m]}
        if linear is None:
            part["up_proj"] = up.chunk(num_parts)[m]
        else:
            part["gate_up_proj"] = torch.cat([up.chunk(num_parts)[m], linear.chunk(num_parts)[m]])
        if up_bias is not None:
            part["up_proj_bias"] = up_bias.chunk(num_parts)[m]
            part["down_proj_bias"] = down_bias / num_parts
        prefix = f"parts.{m}.experts" if config.has_cct else "experts"
        for name, tensor in part.items():
            copies = tensor.expand(config.num_ffn_experts, *tensor.shape)
            parameters[f"{prefix}.{name}"] = copies.contiguous()
    return parameters


def _per_head(tensor: Tensor, num_heads: int) -> Tensor:
    return tensor.unflatten(0, (num_heads, -1))
