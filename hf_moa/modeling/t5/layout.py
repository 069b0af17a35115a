"""Where T5 has a layer's weights: without biases, and with relative position biases in some layers."""

from __future__ import annotations

from torch import Tensor

from hf_moa.pretrained_weights import AttentionWeights, FeedForwardWeights, Layout, stored


class T5Layout(Layout):
    """`block.N.layer.M.SelfAttention.q` and so on."""

    attention = r"(.*block\.\d+\.layer\.\d+\.(?:SelfAttention|EncDecAttention))\.q\.weight"
    attention_output, feed_forward_output = "o", "wo"
    head_weights = (
        ("q.weight", 0),
        ("k.weight", 0),
        ("v.weight", 0),
        ("o.weight", 1),
        ("relative_attention_bias.weight", 1),
    )
    neuron_weights = (("wi.weight", 0), ("wi_0.weight", 0), ("wi_1.weight", 0), ("wo.weight", 1))
    size_fields = ("num_heads", "d_ff", ("num_layers", "num_decoder_layers"))
    feed_forward = r"(.*block\.\d+\.layer\.\d+\.DenseReluDense)\.wo\.weight"

    def read_attention(self, state: dict[str, Tensor], layer: str) -> AttentionWeights:
        return AttentionWeights(
            self.source.num_heads,
            query=state[f"{layer}.q.weight"],
            key=state[f"{layer}.k.weight"],
            value=state[f"{layer}.v.weight"],
            output=state[f"{layer}.o.weight"].T,
            position_bias=state.get(f"{layer}.relative_attention_bias.weight"),
        )

    def table_of(self, layer: str) -> str | None:
        is_shared = not getattr(self.source, "relative_bias_in_every_layer", False)
        return layer.split("block.")[0] if is_shared and layer.endswith("SelfAttention") else None

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
