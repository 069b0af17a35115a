"""Which heads, neurons and layers a nested budget has."""

from __future__ import annotations

from typing import Any, NamedTuple


class Shape(NamedTuple):
    """What a model computes at a budget: the first `heads` heads and `neurons` feed-forward neurons of
    the layers `layers`, counted from 0."""

    heads: int
    neurons: int
    layers: tuple[int, ...]


def shapes_of(config: Any) -> list[Shape]:
    """The shape of a stack of layers at each of `config.nested_budgets`.

    A budget b with l of L layers has the share b L / l of each layer's heads and neurons.
    """
    heads, neurons, depth = config.num_attention_heads, config.ffn_size, num_layers_of(config)
    shapes = []
    for i, budget in enumerate(config.nested_budgets):
        kept = depth if config.nested_layers is None else config.nested_layers[i]
        share = min(1.0, budget * depth / kept)
        shapes.append(
            Shape(
                _rounded(share * heads, 1) if config.nested_heads is None else config.nested_heads[i],
                _rounded(share * neurons, _unit(neurons))
                if config.nested_ffn_sizes is None
                else config.nested_ffn_sizes[i],
                tuple(j * depth // kept for j in range(kept)),
            )
        )
    return shapes


def num_layers_of(config: Any) -> int:
    """Layers of a stack: an encoder-decoder model's halves have configurations of their own."""
    return config.num_hidden_layers


def _unit(neurons: int) -> int:
    """Widths that are multiples of it are fast: of tiles on a GPU, of vectors on a CPU."""
    fit = [unit for unit in (64, 8) if neurons % unit == 0 and neurons >= 8 * unit]
    return fit[0] if fit else 1


def _rounded(size: float, unit: int) -> int:
    return max(unit, round(size / unit) * unit)
