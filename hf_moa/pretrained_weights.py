"""A layer's weights in one form for all backbones, and how they become those of a gated model.

A backbone's `Layout` reads them from a state dict under its own names and writes them back. What a
mechanism makes of them is in its folder, in `upcycling.py`:

    def convert_attention(weights: AttentionWeights, config) -> AttentionWeights
    def convert_feed_forward(weights: FeedForwardWeights, config) -> dict[str, Tensor]
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor
from transformers import PreTrainedModel

from hf_moa.modeling.core.mechanism import mechanisms_of


@dataclass(frozen=True)
class AttentionWeights:
    """Of one attention layer, as `x @ W.T`, except the output's: `x @ W`.

    Attributes:
        num_heads: h, of the source.
        query, key, value: `[h * dh, d]`, and their biases `[h * dh]`; of experts `[N, dh, d]` and
            `[N, dh]`.
        output: `[h * dh, d]`; of experts `[N, dh, d]`. Its bias, which is the layer's, stays as it is.
        position_bias: `[buckets, h]`, where the layer has one.
    """

    num_heads: int
    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    query_bias: Tensor | None = None
    key_bias: Tensor | None = None
    value_bias: Tensor | None = None
    position_bias: Tensor | None = None


@dataclass(frozen=True)
class FeedForwardWeights:
    """Of one feed-forward layer: `up` `[ff, d]`, `down` `[d, ff]`, their biases where there are any, and
    `linear` `[ff, d]`, what the activation is multiplied with, where there is such a thing."""

    up: Tensor
    down: Tensor
    linear: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    def in_order(self, neurons: Tensor) -> FeedForwardWeights:
        """The same layer, its neurons in another order: `[ff]`, the old place of each."""

        def sort(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor[neurons]

        return replace(
            self,
            up=self.up[neurons],
            linear=sort(self.linear),
            up_bias=sort(self.up_bias),
            down=self.down[:, neurons],
        )


class Layout:
    """Where a backbone has a layer's weights.

    Attributes:
        attention, feed_forward: patterns of the name of a weight that each such layer has; the first
            group is the layer's name.
        attention_output, feed_forward_output: the layer's last projection, behind its name.
    """

    attention: ClassVar[str]
    feed_forward: ClassVar[str]
    attention_output: ClassVar[str]
    feed_forward_output: ClassVar[str]

    def __init__(self, source: Any):
        self.source = source

    def read_attention(self, state: dict[str, Tensor], layer: str) -> AttentionWeights:
        """Take an attention layer's weights out of a state dict."""
        raise NotImplementedError

    def write_attention(self, state: dict[str, Tensor], layer: str, weights: AttentionWeights) -> None:
        """Put them in."""
        raise NotImplementedError

    def read_feed_forward(self, state: dict[str, Tensor], layer: str) -> FeedForwardWeights:
        """Take a feed-forward layer's weights out of a state dict."""
        raise NotImplementedError

    def write_feed_forward(
        self, state: dict[str, Tensor], layer: str, weights: FeedForwardWeights
    ) -> None:
        """Put them in, as the source has them."""
        raise NotImplementedError

    def name_of_feed_forward(self, layer: str) -> str:
        """The name of the module that stands for that layer in a gated model."""
        return layer


def convert(state: dict[str, Tensor], layout: Layout, config: Any) -> dict[str, Tensor]:
    """The gated model's state dict, without what the source cannot have.

    Args:
        state: the source's.
        layout: the source's.
        config: the gated model's.
    """
    state = dict(state)
    for mechanism in mechanisms_of(config):
        part = mechanism.part("upcycling")
        if hasattr(part, "convert_attention"):
            for layer in layers_in(state, layout.attention):
                weights = part.convert_attention(layout.read_attention(state, layer), config)
                layout.write_attention(state, layer, weights)
        if hasattr(part, "convert_feed_forward"):
            for layer in layers_in(state, layout.feed_forward):
                weights = part.convert_feed_forward(layout.read_feed_forward(state, layer), config)
                name = layout.name_of_feed_forward(layer)
                state |= {f"{name}.{key}": tensor for key, tensor in weights.items()}
    return state


def sort_neurons(
    state: dict[str, Tensor], layout: Layout, scores: dict[str, Tensor], source: PreTrainedModel
) -> None:
    """Put each feed-forward layer's neurons in the order of their scores, the largest first. What the
    source computes stays the same, to rounding.

    Args:
        state: of the source; changes.
        layout: the source's.
        scores: `Importance.neurons`.
        source: for the names of its layers.

    Raises:
        ValueError: a layer has no scores, or not as many as neurons.
    """
    for layer in layers_in(state, layout.feed_forward):
        name = name_in_base_model(layer, source)
        if name not in scores:
            raise ValueError(
                f"importance must have scores of {name} (got {', '.join(scores) or 'none'}): measure it "
                "on the model that is upcycled."
            )
        weights = layout.read_feed_forward(state, layer)
        order = scores[name].argsort(descending=True, stable=True).to(weights.up.device)
        if len(order) != len(weights.up):
            raise ValueError(
                f"importance must have a score of each of the {len(weights.up)} neurons of {name} (got "
                f"{len(order)})."
            )
        layout.write_feed_forward(state, layer, weights.in_order(order))


def layers_in(state: dict[str, Tensor], pattern: str) -> list[str]:
    """The layers of a state dict; `pattern`: see `Layout`."""
    return [match[1] for name in state if (match := re.fullmatch(pattern, name))]


def name_in_base_model(layer: str, source: PreTrainedModel) -> str:
    """What a layer of `source` is called below its base model."""
    return layer.removeprefix(f"{source.base_model_prefix}.")


def stored(output: Tensor) -> Tensor:
    """An output projection as a linear layer stores it, `[d, h * dh]`; experts' as they are."""
    return output if output.ndim == 3 else output.T.contiguous()
