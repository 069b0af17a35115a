"""Where BERT has a layer's weights."""

from __future__ import annotations

import re

from torch import Tensor

from hf_moa.pretrained_weights import AttentionWeights, FeedForwardWeights, Layout, stored


class BertLayout(Layout):
    """`layer.N.attention.self.query` and so on."""

    attention = r"(.*encoder\.layer\.\d+\.(?:attention|crossattention))\.self\.query\.weight"
    attention_output = feed_forward_output = "output.dense"
    head_weights = (
        *((f"self.{n}.{kind}", 0) for n in ("query", "key", "value") for kind in ("weight", "bias")),
        ("output.dense.weight", 1),
    )
    neuron_weights = (
        ("intermediate.dense.weight", 0),
        ("intermediate.dense.bias", 0),
        ("output.dense.weight", 1),
    )
    size_fields = ("num_attention_heads", "intermediate_size", ("num_hidden_layers",))
    feed_forward = r"(.*encoder\.layer\.\d+)\.intermediate\.dense\.weight"

    def read_attention(self, state: dict[str, Tensor], layer: str) -> AttentionWeights:
        names = ("query", "key", "value")
        weights = {name: state[f"{layer}.self.{name}.weight"] for name in names}
        biases = {f"{name}_bias": state[f"{layer}.self.{name}.bias"] for name in names}
        return AttentionWeights(
            self.source.num_attention_heads,
            output=state[f"{layer}.output.dense.weight"].T,
            position_bias=state.get(_table(layer)),
            **weights,
            **biases,
        )

    def write_attention(self, state: dict[str, Tensor], layer: str, weights: AttentionWeights) -> None:
        for name in ("query", "key", "value"):
            state[f"{layer}.self.{name}.weight"] = getattr(weights, name)
            state[f"{layer}.self.{name}.bias"] = getattr(weights, f"{name}_bias")
        state[f"{layer}.output.dense.weight"] = stored(weights.output)
        if weights.position_bias is not None:
            state[_table(layer)] = weights.position_bias

    def weights_of_heads(self, layer: str) -> list[tuple[str, int]]:
        return [*super().weights_of_heads(layer), (_table(layer), 1)]

    def table_of(self, layer: str) -> str | None:
        has_table = getattr(self.source, "relative_attention_num_buckets", None) is not None
        return layer.split("layer.")[0] if has_table else None

    def read_feed_forward(self, state: dict[str, Tensor], layer: str) -> FeedForwardWeights:
        return FeedForwardWeights(
            up=state.pop(f"{layer}.intermediate.dense.weight"),
            up_bias=state.pop(f"{layer}.intermediate.dense.bias"),
            down=state.pop(f"{layer}.output.dense.weight"),
            down_bias=state.pop(f"{layer}.output.dense.bias"),
        )

    def name_of_feed_forward(self, layer: str) -> str:
        return f"{layer}.feed_forward"


def _table(layer: str) -> str:
    """Of an encoder's first layer, the name of the biases that all its layers share; of the others, one
    that no weight has."""
    return re.sub(r"layer\.0\.attention$", "", layer) + "relative_attention_bias.weight"
