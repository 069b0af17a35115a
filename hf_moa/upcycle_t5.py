"""T5's weights as the weights of a gated T5."""

from __future__ import annotations

from torch import Tensor
from transformers import PreTrainedConfig

from .modeling.t5.configuration import MoaT5Config
from .upcycle_experts import (
    feed_forward_experts,
    heads_of_experts,
    matching,
    mean_over_heads,
    output_experts,
    query_experts,
)

_ATTENTION = r"(.*block\.\d+\.layer\.\d+\.(?:SelfAttention|EncDecAttention))\.q\.weight"
_FEED_FORWARD = r"(.*block\.\d+\.layer\.\d+\.DenseReluDense)\.wo\.weight"


def convert_t5(
    state: dict[str, Tensor], source: PreTrainedConfig, config: MoaT5Config
) -> dict[str, Tensor]:
    """The gated model's state dict, without what the source cannot have; see `convert_bert`."""
    state = dict(state)
    heads = source.num_heads
    if config.attention_type == "moa":
        for prefix in matching(state, _ATTENTION):
            query, output = state[f"{prefix}.q.weight"], state[f"{prefix}.o.weight"].T
            state[f"{prefix}.q.weight"] = query_experts(query, num_heads=heads, config=config)
            state[f"{prefix}.o.weight"] = output_experts(output, num_heads=heads, config=config)
            for name in ("k", "v"):
                shared = mean_over_heads(state[f"{prefix}.{name}.weight"], num_heads=heads)
                state[f"{prefix}.{name}.weight"] = shared
            bias = state.get(f"{prefix}.relative_attention_bias.weight")
            if bias is not None:  # one per head: [buckets, heads] -> [buckets, N]
                bias = bias[:, heads_of_experts(heads, config)]
                state[f"{prefix}.relative_attention_bias.weight"] = bias
    if config.ffn_type == "moe":
        up, linear = ("wi_0", "wi_1") if config.is_gated_act else ("wi", None)
        for prefix in matching(state, _FEED_FORWARD):
            experts = feed_forward_experts(
                config,
                up=state.pop(f"{prefix}.{up}.weight"),
                linear=None if linear is None else state.pop(f"{prefix}.{linear}.weight"),
                down=state.pop(f"{prefix}.wo.weight"),
            )
            state |= {f"{prefix}.{name}": tensor for name, tensor in experts.items()}
    return state
