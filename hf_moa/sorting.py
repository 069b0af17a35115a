"""Which heads and neurons of a pretrained model matter, and the same model with those first.

Budgets take the first ones (`nested_budgets`), and CCT's parts of a feed-forward layer are made of
neighbours (`cct_num_ffn_splits`): where the first are the important ones, a smaller part keeps more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .eval_mode import in_eval_mode
from .families import family_of
from .gated_models import mechanisms_in
from .pretrained_weights import Layout, layers_of


@dataclass(frozen=True)
class Importance:
    """What heads and neurons of each layer contribute, in any unit.

    Attributes:
        heads: by the name of an attention layer, such as `"bert.encoder.layer.0.attention"`, `[h]`.
        neurons: by the name of a feed-forward layer, `[ff]`.
    """

    heads: dict[str, Tensor]
    neurons: dict[str, Tensor]


def importance(
    model: PreTrainedModel, batches: Iterable[Mapping[str, Tensor]], *, at_most: int | None = 1024
) -> Importance:
    """How much a model's loss depends on each head and each neuron (Michel et al. 2019, "Are Sixteen
    Heads Really Better than One?", eq. 2 and section 4.1).

        I_j = sum over examples of |dL / dm_j|,   m_j = 1 a factor of head (or neuron) j of a layer

    which is the activation times its gradient, summed over the tokens of an example. About a thousand
    examples tell the order.

    Args:
        model: a BERT, GPT-2 or T5 model of transformers' or a gated one with plain attention and dense
            feed-forward layers. It is in eval mode meanwhile, and keeps its own gradients.
        batches: inputs of the model with labels, on any device.
        at_most: examples; None takes all batches.

    Returns:
        Sums in float32 on the model's device.

    Raises:
        ValueError: a model of another kind; no batches; batches without labels.

    Example:
        >>> scores = hf_moa.importance(model, DataLoader(dataset, batch_size=32, collate_fn=collator))
        >>> nested = upcycle(model, nested_budgets=[1, 0.5, 0.33], importance=scores)
    """
    layout = family_of(model.config).layout(model.config)
    inputs: dict[str, Tensor] = {}
    handles = []
    modules = dict(model.named_modules())
    names = list(model.state_dict())
    attentions = {f"{n}.{layout.attention_output}": n for n in layers_of(names, layout.attention)}
    feed_forwards = {
        f"{n}.{layout.feed_forward_output}": n for n in layers_of(names, layout.feed_forward)
    }
    if mechanisms := [mechanism.name for mechanism in mechanisms_in(model.config)]:
        raise ValueError(
            f"importance takes a plain model, which `upcycle` sorts (got a {type(model).__name__} with "
            f"{', '.join(mechanisms)})."
        )

    def keep(name: str) -> Any:
        def hook(module: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            # a leaf where nothing before it learns
            inputs[name] = args[0] if args[0].requires_grad else args[0].detach().requires_grad_()
            return (inputs[name], *args[1:])

        return hook

    scores = {name: torch.zeros((), device=model.device) for name in (*attentions, *feed_forwards)}
    seen = 0
    try:
        for name in scores:
            handles.append(modules[name].register_forward_pre_hook(keep(name)))
        with in_eval_mode(model), torch.enable_grad():
            for batch in batches:
                if at_most is not None and seen >= at_most:
                    break
                loss = model(**{key: value.to(model.device) for key, value in batch.items()}).loss
                if loss is None:
                    raise ValueError("batches must have labels, whose loss tells what matters.")
                gradients = torch.autograd.grad(loss, list(inputs.values()))
                for (name, x), gradient in zip(inputs.items(), gradients, strict=True):
                    # of each example, in a loss that is a mean of theirs
                    parts = (x.detach() * gradient).float().flatten(1, -2).sum(dim=1) * len(x)
                    if name in attentions:
                        parts = parts.unflatten(-1, (model.config.num_attention_heads, -1)).sum(dim=-1)
                    scores[name] = scores[name] + parts.abs().sum(dim=0)
                seen += len(x)
    finally:
        for handle in handles:
            handle.remove()
    if not seen:
        raise ValueError("batches must hold at least one (got none).")
    return Importance(
        {layer: scores[name] for name, layer in attentions.items()},
        {layer: scores[name] for name, layer in feed_forwards.items()},
    )


def sort_by_importance(
    state: dict[str, Tensor], layout: Layout, scores: Importance
) -> dict[str, Tensor]:
    """The state dict of the same function, its most important heads and neurons first in every layer.

    Layers that share a table of position biases keep one order of their heads, that of their sum.

    Args:
        state, layout: the source's.
        scores: of all its layers.

    Raises:
        ValueError: a layer without scores, or with another number of them.
    """
    state = dict(state)
    for by_layer, pattern, weights in (
        (scores.heads, layout.attention, layout.head_weights),
        (scores.neurons, layout.feed_forward, layout.neuron_weights),
    ):
        layers = layers_of(state, pattern)
        missing = [layer for layer in layers if layer not in by_layer]
        if missing:
            raise ValueError(f"importance must have scores of every layer (got none of {missing}).")
        for layer in layers:
            table = layout.table_of(layer)
            alike = [layer] if table is None else [n for n in layers if layout.table_of(n) == table]
            scores_of_all = torch.stack([by_layer[n].cpu() for n in alike]).sum(dim=0)
            order = scores_of_all.argsort(descending=True, stable=True)
            for name, axis in ((f"{layer}.{suffix}", axis) for suffix, axis in weights):
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
