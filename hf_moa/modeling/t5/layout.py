"""Where T5 has a layer's weights: without biases, and with relative position biases in first layers."""

from __future__ import annotations

from torch import Tensor

from hf_moa.pretrained_weights import AttentionWeights, FeedForwardWeights, Layout, stored


class T5Layout(Layout):
    """`block.N.layer.M.SelfAttention.q` and so on."""

    attention = r"(.*block\.\d+\.layer\.\d+\.(?:SelfAttention|EncDecAttention))\.q\.weight"
    feed_forward = r"(.*block\.\d+\.layer\.\d+\.DenseReluDense)\.wo\.weight"
    attention_output = "o"
    feed_forward_output = "wo"

    def read_attention(self, state: dict[str, Tensor], layer: str) -> AttentionWeights:
        return AttentionWeights(
            self.source.num_heads,
            query=state[f"{layer}.q.weight"],
            key=state[f"{layer}.k.weight"],
            value=state[f"{layer}.v.weight"],
            output=state[f"{layer}.o.weight"].T,
            position_bias=state.get(f"{layer}.relative_attention_bias.weight"),
        )

    def write_attention(self, state: dict[str, Tensor], layer: str, weights: AttentionWeights) -> None:
        for name in ("query", "key", "value"):
            state[f"{layer}.{name[0]}.weight"] = getattr(weights, name)
        state[f"{layer}.o.weight"] = stored(weights.output)
        if weights.position_bias is not None:
            state[f"{layer}.relative_attention_bias.weight"] = weights.position_bias

    def read_feed_forward(self, state: dict[str, Tensor], layer: str) -> FeedForwardWeights:
        up, linear = ("wi_0", "wi_1") if self.source.is_gated_act else ("wi", None)
        return FeedForwardWeights(
            up=state.pop(f"{layer}.{up}.weight"),
            linear=None if linear is None else state.pop(f"{layer}.{linear}.weight"),
            down=state.pop(f"{layer}.wo.weight"),
        )

    def write_feed_forward(
        self, state: dict[str, Tensor], layer: str, weights: FeedForwardWeights
    ) -> None:
        up = "wi" if weights.linear is None else "wi_0"
        state |= {f"{layer}.{up}.weight": weights.up, f"{layer}.wo.weight": weights.down}
        if weights.linear is not None:
            state[f"{layer}.wi_1.weight"] = weights.linear
