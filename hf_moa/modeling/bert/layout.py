"""Where BERT has a layer's weights."""

from __future__ import annotations

from torch import Tensor

from hf_moa.pretrained_weights import AttentionWeights, FeedForwardWeights, Layout, stored


class BertLayout(Layout):
    """`layer.N.attention.self.query` and so on."""

    attention = r"(.*encoder\.layer\.\d+\.(?:attention|crossattention))\.self\.query\.weight"
    feed_forward = r"(.*encoder\.layer\.\d+)\.intermediate\.dense\.weight"
    attention_output = "output.dense"
    feed_forward_output = "output.dense"

    def read_attention(self, state: dict[str, Tensor], layer: str) -> AttentionWeights:
        names = ("query", "key", "value")
        weights = {name: state[f"{layer}.self.{name}.weight"] for name in names}
        biases = {f"{name}_bias": state[f"{layer}.self.{name}.bias"] for name in names}
        output = state[f"{layer}.output.dense.weight"].T
        return AttentionWeights(self.source.num_attention_heads, output=output, **weights, **biases)

    def write_attention(self, state: dict[str, Tensor], layer: str, weights: AttentionWeights) -> None:
        for name in ("query", "key", "value"):
            state[f"{layer}.self.{name}.weight"] = getattr(weights, name)
            state[f"{layer}.self.{name}.bias"] = getattr(weights, f"{name}_bias")
        state[f"{layer}.output.dense.weight"] = stored(weights.output)

    def read_feed_forward(self, state: dict[str, Tensor], layer: str) -> FeedForwardWeights:
        return FeedForwardWeights(
            up=state.pop(f"{layer}.intermediate.dense.weight"),
            up_bias=state.pop(f"{layer}.intermediate.dense.bias"),
            down=state.pop(f"{layer}.output.dense.weight"),
            down_bias=state.pop(f"{layer}.output.dense.bias"),
        )

    def write_feed_forward(
        self, state: dict[str, Tensor], layer: str, weights: FeedForwardWeights
    ) -> None:
        for name, weight, bias in (
            ("intermediate", weights.up, weights.up_bias),
            ("output", weights.down, weights.down_bias),
        ):
            state[f"{layer}.{name}.dense.weight"] = weight
            state[f"{layer}.{name}.dense.bias"] = bias  # type: ignore[assignment]  # BERT has them

    def name_of_feed_forward(self, layer: str) -> str:
        return f"{layer}.feed_forward"
