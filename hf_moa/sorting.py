"""The same model with its most important heads and neurons first.

Budgets take the first ones (`nested_budgets`), and CCT's parts of a feed-forward layer are made of
neighbours (`cct_num_ffn_splits`): where the first are the important ones, a smaller part keeps more.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .importance import Importance
from .pretrained_weights import Layout, layers_in, name_in_base_model


def sort_by_importance(
    state: dict[str, Tensor], layout: Layout, scores: Importance, source: PreTrainedModel
) -> dict[str, Tensor]:
    """The state dict of the same function, its most important heads and neurons first in every layer.

    Layers that share a table of position biases keep one order of their heads, that of their sum.

    Args:
        state, layout: the source's.
        source: for the names of its layers.
        scores: of all its layers.

    Raises:
        ValueError: a layer without scores, or with another number of them.
    """
    state = dict(state)
    for by_layer, pattern, weights_of in (
        (scores.heads, layout.attention, layout.weights_of_heads),
        (scores.neurons, layout.feed_forward, layout.weights_of_neurons),
    ):
        layers = layers_in(state, pattern)
        names = {layer: name_in_base_model(layer, source) for layer in layers}
        missing = [name for name in names.values() if name not in by_layer]
        if missing:
            raise ValueError(f"importance must have scores of every layer (got none of {missing}).")
        for layer in layers:
            table = layout.table_of(layer)
            alike = [layer] if table is None else [n for n in layers if layout.table_of(n) == table]
            scores_of_all = torch.stack([by_layer[names[n]].cpu() for n in alike]).sum(dim=0)
            order = scores_of_all.argsort(descending=True, stable=True)
            for name, axis in weights_of(layer):
                if name in state:
                    state[name] = _permuted(state[name], axis, order, layout.num_matrices(name), name)
    return state


def _permuted(weight: Tensor, axis: int, order: Tensor, num_matrices: int, name: str) -> Tensor:
    """A weight with the parts of an axis, as many as `order` has in each of its matrices, in that
    order."""
    axis %= weight.ndim
    size = weight.shape[axis] // num_matrices
    if size % len(order):
        raise ValueError(f"importance has {len(order)} scores for {name}, which has {size} to sort.")
    parts = weight.unflatten(axis, (num_matrices, len(order), size // len(order)))
    return parts.index_select(axis + 1, order.to(weight.device)).flatten(axis, axis + 2)
