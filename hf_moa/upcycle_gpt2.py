"""GPT-2's weights as the weights of a gated GPT-2."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from .modeling.gpt2.configuration import MoaGPT2Config
from .upcycle_experts import (
    feed_forward_experts,
    matching,
    mean_over_heads,
    output_experts,
    query_experts,
)

_ATTENTION = r"(.*h\.\d+\.(?:attn|crossattention))\.c_proj\.weight"
_FEED_FORWARD = r"(.*h\.\d+\.mlp)\.c_fc\.weight"


def convert_gpt2(
    state: dict[str, Tensor], source: PreTrainedConfig, config: MoaGPT2Config
) -> dict[str, Tensor]:
    """The gated model's state dict, without what the source cannot have; see `convert_bert`."""
    state = dict(state)
    if config.attention_type == "moa":
        for prefix in matching(state, _ATTENTION):
            _attention(state, prefix, source.n_head, config)
    if config.ffn_type == "moe":
        for prefix in matching(state, _FEED_FORWARD):
            experts = feed_forward_experts(
                config,
                up=state.pop(f"{prefix}.c_fc.weight").T,
                up_bias=state.pop(f"{prefix}.c_fc.bias"),
                down=state.pop(f"{prefix}.c_proj.weight").T,
                down_bias=state.pop(f"{prefix}.c_proj.bias"),
            )
            state |= {f"{prefix}.{name}": tensor for name, tensor in experts.items()}
    return state


def _attention(state: dict[str, Tensor], prefix: str, num_heads: int, config: MoaGPT2Config) -> None:
    """`c_attn`'s queries become experts; its keys and values, mean-pooled, are what is left of it."""
    for kind in ("weight", "bias"):
        # shape: (d, out) -> (out, d), as GPT-2's projections are stored transposed
        merged = _rows_first(state.pop(f"{prefix}.c_attn.{kind}"))
        if f"{prefix}.q_attn.{kind}" in state:  # cross-attention
            query, (key, value) = _rows_first(state[f"{prefix}.q_attn.{kind}"]), merged.chunk(2)
        else:
            query, key, value = merged.chunk(3)
        state[f"{prefix}.q_attn.{kind}"] = query_experts(query, num_heads=num_heads, config=config)
        shared = [mean_over_heads(tensor, num_heads=num_heads) for tensor in (key, value)]
        state[f"{prefix}.c_attn.{kind}"] = _rows_first(torch.cat(shared)).contiguous()
    output = state[f"{prefix}.c_proj.weight"]
    state[f"{prefix}.c_proj.weight"] = output_experts(output, num_heads=num_heads, config=config)


def _rows_first(tensor: Tensor) -> Tensor:
    """A weight transposed, a bias as it is."""
    return tensor.T if tensor.ndim == 2 else tensor
