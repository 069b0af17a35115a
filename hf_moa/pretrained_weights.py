"""A layer's weights in one form for all backbones, and how they become those of a gated model.

A backbone's `Layout` reads them from a state dict under its own names and writes them back. What a
mechanism makes of them is in its folder, in `upcycling.py`:

    def convert_attention(weights: AttentionWeights, config) -> AttentionWeights
    def convert_feed_forward(weights: FeedForwardWeights, config) -> dict[str, Tensor]
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
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


class Layout:
    """Where a backbone has a layer's weights.

    Attributes:
        attention, feed_forward: patterns of the name of a weight that each such layer has; the first
            group is the layer's name.
        attention_output, feed_forward_output: the last projection of such a layer, behind its name.
        head_weights, neuron_weights: the weights that hold heads, or neurons, and their axis.
        size_fields: the configuration's numbers of heads, of feed-forward neurons, and of layers.
    """

    attention: ClassVar[str]
    feed_forward: ClassVar[str]
    size_fields: ClassVar[tuple[str, str, tuple[str, ...]]]
    attention_output: ClassVar[str]
    feed_forward_output: ClassVar[str]
    head_weights: ClassVar[tuple[tuple[str, int], ...]]
    neuron_weights: ClassVar[tuple[tuple[str, int], ...]]

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

    def weights_of_heads(self, layer: str) -> list[tuple[str, int]]:
        """An attention layer's weights that hold heads, and their axis. Some may not be there."""
        return [(f"{layer}.{name}", axis) for name, axis in self.head_weights]

    def weights_of_neurons(self, layer: str) -> list[tuple[str, int]]:
        """A feed-forward layer's weights that hold neurons, and their axis."""
        return [(f"{layer}.{name}", axis) for name, axis in self.neuron_weights]

    def num_matrices(self, name: str) -> int:
        """How many matrices of heads a weight holds side by side."""
        return 1

    def table_of(self, layer: str) -> str | None:
        """A name for the table of position biases, one for each head, that an attention layer shares
        with others; None where it shares none."""
        return None

    def name_of_feed_forward(self, layer: str) -> str:
        """The name of the module that stands for that layer in a gated model."""
        return layer


def head_size(source: Any) -> int:
    """The size of a head, of a pretrained model's configuration."""
    return getattr(source, "head_dim", None) or source.hidden_size // source.num_attention_heads


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


def layers_in(state: Iterable[str], pattern: str) -> list[str]:
    """The first groups of the names that match `pattern` in full."""
    return [match[1] for name in state if (match := re.fullmatch(pattern, name))]


def name_in_base_model(layer: str, source: PreTrainedModel) -> str:
    """What a layer of `source` is called below its base model."""
    return layer.removeprefix(f"{source.base_model_prefix}.")


def stored(output: Tensor) -> Tensor:
    """An output projection as a linear layer stores it, `[d, h * dh]`; experts' as they are."""
    return output if output.ndim == 3 else output.T.contiguous()
