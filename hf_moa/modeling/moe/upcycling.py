"""How feed-forward experts start from a pretrained layer (Komatsuzaki et al. 2023)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_moa.pretrained_weights import FeedForwardWeights


def convert_feed_forward(weights: FeedForwardWeights, config: Any) -> dict[str, Tensor]:
    """Every expert is a copy of the layer; with CCT, of its slice of the layer.

    Returns:
        Parameters by name, below the name of the feed-forward layer.
    """
    num_parts = config.cct_num_ffn_splits if config.has_cct else 1
    parameters = {}
    for m in range(num_parts):
        up = weights.up.chunk(num_parts)[m]
        part = {"down_proj": weights.down.chunk(num_parts, dim=1)[m]}
        if weights.linear is None:
            part["up_proj"] = up
        else:
            part["gate_up_proj"] = torch.cat([up, weights.linear.chunk(num_parts)[m]])
        if weights.up_bias is not None:
            part["up_proj_bias"] = weights.up_bias.chunk(num_parts)[m]
        if weights.down_bias is not None:
            part["down_proj_bias"] = weights.down_bias / num_parts
        prefix = f"parts.{m}.experts" if config.has_cct else "experts"
        for name, tensor in part.items():
            copies = tensor.expand(config.num_ffn_experts, *tensor.shape)
            parameters[f"{prefix}.{name}"] = copies.contiguous()
    return parameters
