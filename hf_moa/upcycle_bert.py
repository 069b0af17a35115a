"""BERT's weights as the weights of a gated BERT."""

from __future__ import annotations

import re

from torch import Tensor
from transformers import PreTrainedConfig

from .modeling.configuration_moa_bert import MoaBertConfig

_ATTENTION = re.compile(r"(.*encoder\.layer\.\d+\.(?:attention|crossattention))\.self\.query\.weight")
_FEED_FORWARD = re.compile(r"(.*encoder\.layer\.\d+)\.intermediate\.dense\.weight")


def convert_bert(
    state: dict[str, Tensor], source: PreTrainedConfig, config: MoaBertConfig
) -> dict[str, Tensor]:
    """The gated model's state dict, without what the source cannot have.

    Args:
        state: the source's state dict.
        source: its config.
        config: the gated model's.
    """
    state = dict(state)
    if config.attention_type == "moa":
        for prefix in _prefixes(state, _ATTENTION):
            _heads_to_experts(state, prefix, source.num_attention_heads, config)
    if config.ffn_type == "moe":
        for prefix in _prefixes(state, _FEED_FORWARD):
            _dense_to_experts(state, prefix, config)
    return state


def _prefixes(state: dict[str, Tensor], pattern: re.Pattern) -> list[str]:
    return [match[1] for name in state if (match := pattern.fullmatch(name))]


def _heads_to_experts(
    state: dict[str, Tensor], prefix: str, num_heads: int, config: MoaBertConfig
) -> None:
    """Expert i from head `i % h`; keys and values from the mean over heads."""
    head_of_expert = [i % num_heads for i in range(config.attention_experts)]

    def per_head(name: str) -> Tensor:
        tensor = state[f"{prefix}.self.{name}"]
        return tensor.unflatten(0, (num_heads, -1))  # [h, dh, ...]

    for kind in ("weight", "bias"):
        state[f"{prefix}.self.query.{kind}"] = per_head(f"query.{kind}")[head_of_expert]
        for name in ("key", "value"):
            state[f"{prefix}.self.{name}.{kind}"] = per_head(f"{name}.{kind}").mean(dim=0)
    # shape: (d, h * dh) -> (h, dh, d); the weights of the k active experts sum to 1, not to k
    output = state[f"{prefix}.output.dense.weight"].unflatten(1, (num_heads, -1)).permute(1, 2, 0)
    state[f"{prefix}.output.dense.weight"] = (
        output[head_of_expert] * config.num_attention_heads
    ).contiguous()


def _dense_to_experts(state: dict[str, Tensor], prefix: str, config: MoaBertConfig) -> None:
    """Every expert a copy of the dense layer; with CCT, of its slice of the layer."""
    num_parts = config.cct_num_ffn_splits if config.has_cct else 1
    up, up_bias, down, down_bias = (
        state.pop(f"{prefix}.{module}.dense.{kind}")
        for module in ("intermediate", "output")
        for kind in ("weight", "bias")
    )
    slices = zip(
        up.chunk(num_parts), up_bias.chunk(num_parts), down.chunk(num_parts, dim=1), strict=True
    )
    for m, (up_slice, up_bias_slice, down_slice) in enumerate(slices):
        part = f"{prefix}.feed_forward" + (f".parts.{m}" if config.has_cct else "") + ".experts"
        for name, tensor in (
            ("up_proj", up_slice),
            ("up_proj_bias", up_bias_slice),
            ("down_proj", down_slice),
            ("down_proj_bias", down_bias / num_parts),
        ):
            copies = tensor.expand(config.num_ffn_experts, *tensor.shape)
            state[f"{part}.{name}"] = copies.contiguous()
