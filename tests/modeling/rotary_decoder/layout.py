"""Where Llama has a layer's weights."""

from __future__ import annotations

from hf_moa.pretrained_weights import AttentionWeights, FeedForwardWeights, Layout


class LlamaLayout(Layout):
    attention = r"(.*layers\.\d+\.self_attn)\.o_proj\.weight"
    attention_output, feed_forward_output = "o_proj", "down_proj"
    feed_forward = r"(.*layers\.\d+\.mlp)\.down_proj\.weight"
    head_weights = ()  # they stay beside those that share their keys
    neuron_weights = (("gate_proj.weight", 0), ("up_proj.weight", 0), ("down_proj.weight", 1))
    size_fields = ("num_attention_heads", "intermediate_size", ("num_hidden_layers",))

    def read_attention(self, state, layer):
        heads, groups = self.source.num_attention_heads, self.source.num_key_value_heads
        query, key, value = (state.pop(f"{layer}.{name}_proj.weight") for name in "qkv")
        # each head of keys for all its queries
        key, value = (
            x.unflatten(0, (groups, -1)).repeat_interleave(heads // groups, 0).flatten(0, 1)
            for x in (key, value)
        )
        output = state[f"{layer}.o_proj.weight"].T
        return AttentionWeights(heads, query=query, key=key, value=value, output=output)

    def write_attention(self, state, layer, weights):
        for name in ("query", "key", "value"):
            state[f"{layer}.{name[0]}_proj.weight"] = getattr(weights, name)
        state[f"{layer}.o_proj.weight"] = weights.output

    def read_feed_forward(self, state, layer):
        gate, up, down = (state.pop(f"{layer}.{name}_proj.weight") for name in ("gate", "up", "down"))
        return FeedForwardWeights(up=gate, linear=up, down=down)
