"""The losses of distillation: how far a student is from a teacher, in its logits and hidden states.

With w = `distillation_weight`, T = `distillation_temperature`, v = `distillation_hidden_weight`, a
student s, a teacher t and a loss L of the labels:

    (1 - w) L + w T^2 KL(softmax(t / T) || softmax(s / T)) + v sum(m (h_s - h_t)^2) / sum(m h_t^2)

The second term is of Hinton et al. 2015, "Distilling the Knowledge in a Neural Network", section 2. The
third, of hidden states h at positions that a mask m has, is near to those of Sanh et al. 2019
("DistilBERT") and Jiao et al. 2020 ("TinyBERT", equation 8); it is relative, so that a weight of 1 suits
models of any scale.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_moa.modeling.core.precision import at_least_float32
from hf_moa.modeling.core.task_losses import IGNORE_INDEX, next_token_labels, up_to_last_label

SPANS = ("start_logits", "end_logits")


class Views(NamedTuple):
    """What student and teacher are compared by.

    Attributes:
        logits: each `[n, classes]`: of sequences, of labelled tokens, of a span's start and end.
        hidden: each `[B, T, d]`: encoder-decoder models have those of both.
    """

    logits: tuple[Tensor, ...]
    hidden: tuple[Tensor, ...]

    def detached(self) -> Views:
        return Views(*(tuple(x.detach() for x in each) for each in self))


# --- equations --------------------------------------------------------------------------------------


def logits_divergence(logits: Tensor, target: Tensor, temperature: float) -> Tensor:
    """`T^2 KL(softmax(t / T) || softmax(s / T))` of each of n distributions (Hinton et al. 2015).

    Args:
        logits: s, `[n, classes]`.
        target: t, of the same shape; no gradient reaches it.
        temperature: T > 0. The factor T^2 keeps gradients as large as those of labels.

    Returns:
        `[n]`, in float32 at least.
    """
    student = (at_least_float32(logits) / temperature).log_softmax(dim=-1)
    teacher = (at_least_float32(target.detach()) / temperature).log_softmax(dim=-1)
    divergence = nn.functional.kl_div(student, teacher, log_target=True, reduction="none").sum(dim=-1)
    return temperature**2 * divergence


def label_divergences(logits: Tensor, target: Tensor, temperature: float) -> Tensor:
    """The same where each class is present or not, whatever the others are: with p = sigmoid(. / T),
    `T^2 KL(Bernoulli(p_t) || Bernoulli(p_s))`, the mean over classes. `[n, classes]` -> `[n]`."""
    # softmax of (x, 0) is (sigmoid(x), 1 - sigmoid(x))
    student, teacher = (torch.stack([x, torch.zeros_like(x)], dim=-1) for x in (logits, target))
    return logits_divergence(student, teacher, temperature).mean(dim=-1)


def squared_difference(logits: Tensor, target: Tensor, temperature: float = 1.0) -> Tensor:
    """Of regression: `(s - t)^2`, the mean over outputs. `[n, outputs]` -> `[n]`. There is no softmax
    whose temperature could be raised."""
    difference = at_least_float32(logits) - at_least_float32(target.detach())
    return difference.square().mean(dim=-1)


def hidden_error(hidden: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    """`sum(m (h_s - h_t)^2) / sum(m h_t^2)`.

    Args:
        hidden, target: h_s and h_t, `[B, T, d]`; no gradient reaches the target.
        mask: m, `[B, T]`, the positions that count.

    Returns:
        A scalar, in float32 at least; 0 where no position counts.
    """
    hidden, target = at_least_float32(hidden), at_least_float32(target.detach())
    weight = mask.to(hidden.dtype).unsqueeze(-1)
    scale = (target.square() * weight).sum()
    error = ((hidden - target).square() * weight).sum()
    return error / scale.clamp(min=torch.finfo(scale.dtype).tiny)


_OF_ROWS: dict[str | None, Callable[[Tensor, Tensor, float], Tensor]] = {
    "regression": squared_difference,
    "multi_label_classification": label_divergences,
}


# --- of a model's outputs ----------------------------------------------------------------------------


class Comparison:
    """What of a batch student and teacher are compared by, and how.

    Args:
        batch: what the student is called with, labels among it.
        config: the student's. Its `problem_type` is known once it has computed a loss.
        shifts_labels: the logits of a position are for the next one's label.
    """

    def __init__(self, batch: Mapping[str, Any], *, config: Any, shifts_labels: bool):
        self.batch = batch
        self.config = config
        labels = batch.get("labels")
        self.labels = next_token_labels(labels) if shifts_labels and labels is not None else labels
        self.count = batch.get("num_items_in_batch")

    def views(self, outputs: Mapping[str, Any], layers: Sequence[int]) -> Views:
        """What of a model's outputs is compared.

        Args:
            outputs: of the student or the teacher.
            layers: which of its hidden states, 0 for the embeddings, -1 for the last.
        """
        states = [states for states, _ in self._stacks(outputs)] if layers else []
        return Views(self._logits(outputs), tuple(state[i] for state in states for i in layers))

    def masks(self, outputs: Mapping[str, Any], layers: Sequence[Any]) -> list[Tensor]:
        """Of the positions that count, one for each of `views(...).hidden`."""
        return [mask for _, mask in self._stacks(outputs) for _ in layers] if layers else []

    def divergence(self, student: Views, teacher: Views, temperature: float) -> Tensor:
        """The mean of the logits' divergences: over sequences, or over labelled tokens. With
        `num_items_in_batch` the sum, divided by it."""
        problem_type = None if self.is_of_tokens else getattr(self.config, "problem_type", None)
        of_rows = _OF_ROWS.get(problem_type, logits_divergence)
        pairs = zip(student.logits, teacher.logits, strict=True)
        return torch.stack([self._mean(of_rows(s, t, temperature)) for s, t in pairs]).mean()

    @property
    def is_of_tokens(self) -> bool:
        """Whether labels are of tokens."""
        labels = self.labels
        return labels is not None and labels.ndim == 2 and not labels.is_floating_point()

    def part(self, mean: Tensor) -> Tensor:
        """What a mean over this batch adds to that over the accumulated one: the mean itself, or with
        `num_items_in_batch` its part by labels."""
        if self.count is None or self.labels is None:
            return mean
        own = (self.labels != IGNORE_INDEX).sum()
        return mean * own.to(mean.device) / torch.as_tensor(self.count, device=mean.device).sum()

    def _mean(self, rows: Tensor) -> Tensor:
        count = torch.as_tensor(len(rows) if self.count is None else self.count, device=rows.device)
        return rows.sum() / count.sum()

    def _logits(self, outputs: Mapping[str, Any]) -> tuple[Tensor, ...]:
        if all(name in outputs for name in SPANS):
            return tuple(outputs[name] for name in SPANS)
        logits = outputs["logits"]
        if not self.is_of_tokens:
            return (logits if logits.ndim > 1 else logits.unsqueeze(-1),)
        if logits.ndim == 2:  # of the labelled tokens alone
            return (logits,)
        return (logits[self.labels.to(logits.device) != IGNORE_INDEX],)  # type: ignore[union-attr]

    def _stacks(self, outputs: Mapping[str, Any]) -> list[tuple[tuple[Tensor, ...], Tensor]]:
        """The hidden states of each stack of layers, with the mask of its positions."""
        batch = self.batch
        if outputs.get("decoder_hidden_states") is None:
            states = outputs["hidden_states"]
            return [(states, _positions(batch.get("attention_mask"), states[-1]))]
        encoder, decoder = outputs["encoder_hidden_states"], outputs["decoder_hidden_states"]
        decoder_mask = batch.get("decoder_attention_mask")
        if decoder_mask is None and self.is_of_tokens:
            decoder_mask = up_to_last_label(batch["labels"])
        elif decoder_mask is None:
            decoder_mask = batch.get("attention_mask")
        return [
            (encoder, _positions(batch.get("attention_mask"), encoder[-1])),
            (decoder, _positions(decoder_mask, decoder[-1])),
        ]


def _positions(mask: Tensor | None, states: Tensor) -> Tensor:
    """`[B, T]`; all where there is no mask, or one of pairs of positions. Choices, `[B, choices, T]`,
    count as sequences."""
    shape = states.shape[:2]
    if mask is None or mask.numel() != shape.numel():
        return torch.ones(shape, device=states.device)
    return mask.reshape(shape).to(states.device)
