"""Where GPT-2 has a layer's weights: transposed, and queries, keys and values in one matrix."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_moa.pretrained_weights import AttentionWeights, FeedForwardWeights, Layout


class Gpt2Layout(Layout):
    """`h.N.attn.c_attn` and so on; queries of cross-attention, and of experts, are in `q_attn`."""

    attention = r"(.*h\.\d+\.(?:attn|crossattention))\.c_proj\.weight"
    feed_forward = r"(.*h\.\d+\.mlp)\.c_fc\.weight"
    attention_output = "c_proj"
    feed_forward_output = "c_proj"

    def read_attention(self, state: dict[str, Tensor], layer: str) -> AttentionWeights:
        query, key, value = self._query_key_value(state, layer, "weight")
        query_bias, key_bias, value_bias = self._query_key_value(state, layer, "bias")
        return AttentionWeights(
            self.source.n_head,
            query=query,
            key=key,
            value=value,
            output=state[f"{layer}.c_proj.weight"],
            query_bias=query_bias,
            key_bias=key_bias,
            value_bias=value_bias,
        )

    def _query_key_value(self, state: dict[str, Tensor], layer: str, kind: str) -> tuple[Tensor, ...]:
        taken: list[Any] = [state.pop(f"{layer}.{name}.{kind}", None) for name in ("q_attn", "c_attn")]
        # shape: (d, out) -> (out, d); a bias stays as it is
        query, merged = (x.T if x is not None and x.ndim == 2 else x for x in taken)
        return merged.chunk(3) if query is None else (query, *merged.chunk(2))

    def write_attention(self, state: dict[str, Tensor], layer: str, weights: AttentionWeights) -> None:
        state[f"{layer}.q_attn.weight"] = weights.query
        # GPT-2 has all biases
        biases: list[Any] = [weights.query_bias, weights.key_bias, weights.value_bias]
        state[f"{layer}.q_attn.bias"] = biases[0]
        key_value = torch.cat([weights.key, weights.value])
        state[f"{layer}.c_attn.weight"] = key_value.T.contiguous()
        state[f"{layer}.c_attn.bias"] = torch.cat(biases[1:])
        state[f"{layer}.c_proj.weight"] = weights.output

    def read_feed_forward(self, state: dict[str, Tensor], layer: str) -> FeedForwardWeights:
        return FeedForwardWeights(
            up=state.pop(f"{layer}.c_fc.weight").T,
            up_bias=state.pop(f"{layer}.c_fc.bias"),
            down=state.pop(f"{layer}.c_proj.weight").T,
            down_bias=state.pop(f"{layer}.c_proj.bias"),
        )

    def write_feed_forward(
        self, state: dict[str, Tensor], layer: str, weights: FeedForwardWeights
    ) -> None:
        for name, weight, bias in (
            ("c_fc", weights.up, weights.up_bias),
            ("c_proj", weights.down, weights.down_bias),
        ):
            state[f"{layer}.{name}.weight"] = weight.T.contiguous()
            state[f"{layer}.{name}.bias"] = bias  # type: ignore[assignment]  # GPT-2 has them
