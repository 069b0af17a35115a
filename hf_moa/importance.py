"""How much a model's attention heads and feed-forward neurons matter to its loss.

from hf_moa import importance
scores = importance(model, batches)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .eval_mode import in_eval_mode
from .families import family_of
from .gated_models import mechanisms_in
from .modeling.core.precision import at_least_float32
from .pretrained_weights import layers_in, name_in_base_model
from .relatives import to_family

__all__ = ["Importance", "importance"]


@dataclass(frozen=True)
class Importance:
    """Scores of a model's heads and neurons: the larger, the more they matter to it. They are comparable
    within a layer.

    Attributes:
        heads: attention layer -> `[h]`, cross-attention included.
        neurons: feed-forward layer -> `[ff]`.

    Layers go by the names of transformers' modules below the base model, such as
    "encoder.layer.0.attention" and "encoder.layer.0" of BERT: see the backbone's `Layout`. A relative's,
    such as RoBERTa's, go by the names of its family. One that no batch came through is not there.
    """

    heads: dict[str, Tensor]
    neurons: dict[str, Tensor]


def importance(model: PreTrainedModel, batches: Iterable[Mapping[str, Any]]) -> Importance:
    """How much each head and each feed-forward neuron matters to a model's loss: the size of the loss's
    gradient with respect to a gate on it (Michel et al. 2019, "Are Sixteen Heads Really Better than
    One?", section 4.1).

    `I = sum over examples | sum over tokens of a * dL/da |`: a is the context of a head, whose dh
    numbers are summed over too, or the hidden activation of a neuron; L is the loss of the model's own
    head in eval mode, a mean over the batch, times the number of its examples.

    Args:
        model: any that `upcycle` takes. It stays as it is, `grad` of its parameters too.
        batches: the model's arguments by name, labels among them; tensors `[B, ...]`. A few hundred
            examples are enough.

    Returns:
        The scores, in float32 at least, on the devices of the layers.

    Raises:
        ValueError: another kind of model, no batches, a batch without labels, or gradients that are not
            finite.

    Example:
        >>> batch = tokenizer(["a head"], return_tensors="pt") | {"labels": torch.tensor([1])}
        >>> importance(model, [batch]).heads["encoder.layer.0.attention"].shape
        torch.Size([12])
    """
    model = _checked(model)
    places = _places(model)
    with in_eval_mode(model), torch.enable_grad():
        for batch in batches:
            with _watched(model, places) as seen:
                loss, size = _loss(model, batch)
            gradients = torch.autograd.grad(loss * size, [activation for _, activation in seen])
            for (place, activation), gradient in zip(seen, gradients, strict=True):
                place.add(activation.detach(), gradient, size)
    found = [place for place in places if place.score is not None]
    if not found:
        raise ValueError("batches must hold at least one batch (got none).")
    for place in found:
        if not bool(place.score.isfinite().all()):
            raise ValueError(
                f"The gradients at {place.module} must be finite, and are not: look at the batches' "
                "labels, and at the model's dtype."
            )
    return Importance(
        heads={place.layer: place.score for place in found if place.are_heads},
        neurons={place.layer: place.score for place in found if not place.are_heads},
    )


@dataclass(eq=False)
class _Place:
    """The input of a layer's last projection, whose numbers belong to heads or are neurons' each.

    Attributes:
        module: the projection's name.
        layer: what `Importance` calls the layer.
        num_heads: None where the numbers are neurons'.
        score: `[num_heads]`, or one of each neuron, of the batches so far.
    """

    module: str
    layer: str
    num_heads: int | None
    score: Any = None

    @property
    def are_heads(self) -> bool:
        return self.num_heads is not None

    def add(self, activation: Tensor, gradient: Tensor, size: int) -> None:
        """Add those of a batch of `size` examples, `[B, T, numbers]`."""
        product = at_least_float32(activation) * at_least_float32(gradient)
        parts = self.num_heads or product.shape[-1]
        # several sequences may be of one example; shape: (B, tokens, parts, numbers of one)
        of_gates = product.reshape(size, -1, parts, product.shape[-1] // parts).sum(dim=(1, 3))
        score = of_gates.abs().sum(dim=0)
        self.score = score if self.score is None else self.score + score


def _checked(model: Any) -> PreTrainedModel:
    """The model, of its family's classes where it is a relative's."""
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"model must be a model of transformers (got {type(model).__name__}). A PEFT model's "
            "adapter is merged first: model.merge_and_unload()."
        )
    if mechanisms := mechanisms_in(model.config):
        raise ValueError(
            "importance takes a plain model: attention_type='mha', ffn_type='dense' and no cct_budgets "
            f"(got {', '.join(mechanism.name for mechanism in mechanisms)})."
        )
    return to_family(model)


def _places(model: PreTrainedModel) -> list[_Place]:
    family: Any = family_of(model.config)
    layout, state = family.layout(model.config), model.state_dict()

    def of(pattern: str, output: str, num_heads: int | None) -> list[_Place]:
        return [
            _Place(f"{layer}.{output}", name_in_base_model(layer, model), num_heads)
            for layer in layers_in(state, pattern)
        ]

    heads = of(layout.attention, layout.attention_output, model.config.num_attention_heads)
    return heads + of(layout.feed_forward, layout.feed_forward_output, None)


@contextmanager
def _watched(model: nn.Module, places: list[_Place]) -> Iterator[list[tuple[_Place, Tensor]]]:
    """What comes to each place meanwhile, with gradients."""
    seen: list[tuple[_Place, Tensor]] = []

    def watch(place: _Place) -> Callable[..., tuple[Any, ...]]:
        def take(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            activation, *others = inputs
            if not activation.requires_grad:  # where all parameters before are frozen
                activation = activation.detach().requires_grad_()
            seen.append((place, activation))
            return (activation, *others)

        return take

    hooks = [
        model.get_submodule(place.module).register_forward_pre_hook(watch(place)) for place in places
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _loss(model: PreTrainedModel, batch: Mapping[str, Any]) -> tuple[Tensor, int]:
    """The loss of a batch, and how many examples there are."""
    moved = {k: v.to(model.device) if isinstance(v, Tensor) else v for k, v in batch.items()}
    loss = getattr(model(**moved), "loss", None)
    if loss is None:
        raise ValueError(
            f"Each batch must give {type(model).__name__} what its loss takes, such as labels (got "
            f"{', '.join(batch)})."
        )
    return loss, max(len(v) for v in moved.values() if isinstance(v, Tensor) and v.ndim)
