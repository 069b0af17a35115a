"""BERT's weights as the weights of a gated BERT."""

from __future__ import annotations

from torch import Tensor
from transformers import PreTrainedConfig

from .modeling.bert.configuration import MoaBertConfig
from .upcycle_experts import (
    feed_forward_experts,
    matching,
    mean_over_heads,
    output_experts,
    query_experts,
)

_ATTENTION = r"(.*encoder\.layer\.\d+\.(?:attention|crossattention))\.self\.query\.weight"
_FEED_FORWARD = r"(.*encoder\.layer\.\d+)\.intermediate\.dense\.weight"


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
    heads = source.num_attention_heads
    if config.attention_type == "moa":
        for prefix in matching(state, _ATTENTION):
            for kind in ("weight", "bias"):
                query = state[f"{prefix}.self.query.{kind}"]
                state[f"{prefix}.self.query.{kind}"] = query_experts(
                    query, num_heads=heads, config=config
                )
                for name in ("key", "value"):
                    shared = mean_over_heads(state[f"{prefix}.self.{name}.{kind}"], num_heads=heads)
                    state[f"{prefix}.self.{name}.{kind}"] = shared
            output = state[f"{prefix}.output.dense.weight"].T
            state[f"{prefix}.output.dense.weight"] = output_experts(
                output, num_heads=heads, config=config
            )
    if config.ffn_type == "moe":
        for prefix in matching(state, _FEED_FORWARD):
            experts = feed_forward_experts(
                config,
                up=state.pop(f"{prefix}.intermediate.dense.weight"),
                up_bias=state.pop(f"{prefix}.intermediate.dense.bias"),
                down=state.pop(f"{prefix}.output.dense.weight"),
                down_bias=state.pop(f"{prefix}.output.dense.bias"),
            )
            state |= {f"{prefix}.feed_forward.{name}": tensor for name, tensor in experts.items()}
    return state
