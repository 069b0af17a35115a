"""A teacher's part in the loss: its probabilities and its hidden states beside the labels.

    L = (1 - w) L_task + w T^2 KL(teacher || student at temperature T) + v |h - h_t|^2 / |h_t|^2

(Hinton et al. 2015 for the second term; Sanh et al. 2019 and Jiao et al. 2020 train on hidden states
too.) The KL divergence is a mean over what the task's loss is a mean over: examples, labelled tokens, or
both ends of an answer. A regression has the squared error of the outputs instead of it. The last hidden
states are compared over the real tokens of the batch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging

from hf_moa.gated_models import auto_class_names
from hf_moa.modeling.core.precision import at_least_float32
from hf_moa.modeling.core.task_losses import IGNORE_INDEX, next_token_labels, token_share

logger = logging.get_logger(__name__)

# Arguments of a call that are the student's own.
_OF_THE_STUDENT = ("budget", "num_items_in_batch", "output_expert_weights", "output_hidden_states")
_HIDDEN_STATES = ("hidden_states", "encoder_hidden_states", "decoder_hidden_states")
_LOGITS = ("logits", "start_logits", "end_logits")


@dataclass(frozen=True)
class Targets:
    """What a teacher says of a batch.

    Attributes:
        logits: by the names that outputs have for them.
        hidden_states: the last ones, by the names of the fields of all.
    """

    logits: dict[str, Tensor]
    hidden_states: dict[str, Tensor]

    @classmethod
    def of(cls, outputs: Any) -> Targets:
        """Those of a teacher's outputs, without a graph."""
        found = {name: outputs[name].detach() for name in _LOGITS if outputs.get(name) is not None}
        if not found:
            raise ValueError(f"teacher must give logits (got {', '.join(outputs)}).")
        states = {n: outputs[n][-1].detach() for n in _HIDDEN_STATES if outputs.get(n) is not None}
        return cls(found, states)


class Distillation:
    """The loss of a student that has a teacher.

    Args:
        weight: w, of the teacher's probabilities against the labels; in [0, 1].
        temperature: T.
        hidden_weight: v; 0 leaves hidden states out.
        shifts_labels: the logits of a position are for the next one's label.
    """

    def __init__(self, *, weight: float, temperature: float, hidden_weight: float, shifts_labels: bool):
        self.weight, self.temperature, self.hidden_weight = weight, temperature, hidden_weight
        self.shifts_labels = shifts_labels

    def loss(self, outputs: Any, targets: Targets, inputs: Mapping[str, Any]) -> Tensor:
        """L, and the auxiliary terms that are in the outputs' loss.

        Args:
            outputs: of the student, with `loss` and hidden states.
            targets: the teacher's.
            inputs: that both had, the labels among them.

        Raises:
            ValueError: the teacher's logits are of another shape.
        """
        task = outputs.get("task_loss")
        auxiliary = 0.0 if task is None else outputs["loss"] - task
        task = outputs["loss"] if task is None else task
        loss = (1 - self.weight) * task + self.weight * self._divergence(outputs, targets, inputs)
        if self.hidden_weight:
            loss = loss + self.hidden_weight * self._hidden_error(outputs, targets, inputs)
        return loss + auxiliary

    def _divergence(self, outputs: Any, targets: Targets, inputs: Mapping[str, Any]) -> Tensor:
        labels = inputs.get("labels")
        found = []
        for name, theirs in targets.logits.items():
            own, theirs = at_least_float32(outputs[name]), at_least_float32(theirs)
            valid = None
            if name == "logits" and labels is not None and labels.ndim == theirs.ndim - 1 > 1:
                # each labelled token has a prediction
                shifted = next_token_labels(labels) if self.shifts_labels else labels
                valid = (shifted != IGNORE_INDEX).to(theirs.device)
                theirs = theirs[valid]
                own = own if own.ndim < outputs[name].ndim or own.shape == theirs.shape else own[valid]
            if own.shape != theirs.shape:
                raise ValueError(
                    f"teacher must have the student's labels or vocabulary: {name} of shape "
                    f"{tuple(own.shape)} (got {tuple(theirs.shape)})."
                )
            found.append(self._between(own, theirs, labels, inputs.get("num_items_in_batch"), valid))
        return torch.stack(found).mean()

    def _between(
        self, own: Tensor, theirs: Tensor, labels: Any, num_items: Any, valid: Tensor | None
    ) -> Tensor:
        """The divergence of logits `[n, classes]`, or of the numbers of a regression."""
        if own.shape[-1] == 1 or (labels is not None and labels.is_floating_point()):
            return nn.functional.mse_loss(own, theirs)
        own, theirs = (nn.functional.log_softmax(x / self.temperature, dim=-1) for x in (own, theirs))
        total = nn.functional.kl_div(own, theirs, log_target=True, reduction="sum")
        count: Any = max(1, own.shape[:-1].numel())
        if valid is not None and num_items is not None:
            count = torch.as_tensor(num_items, device=total.device)
        return total / count * self.temperature**2

    def _hidden_error(self, outputs: Any, targets: Targets, inputs: Mapping[str, Any]) -> Tensor:
        found = []
        for name, theirs in targets.hidden_states.items():
            own, theirs = at_least_float32(outputs[name][-1]), at_least_float32(theirs)
            mask = _mask_of(name, own, inputs)
            difference, size = (own - theirs).square(), theirs.square()
            if mask is not None:
                difference, size = difference * mask, size * mask
            found.append(difference.sum() / size.sum().clamp(min=torch.finfo(size.dtype).tiny))
        if not found:
            return outputs["loss"].new_zeros(())
        # where the task's loss is a part of the accumulated batch's, so is this
        labels = inputs.get("labels")
        share = token_share(labels, inputs.get("num_items_in_batch")) if labels is not None else 1.0
        return torch.stack(found).mean() * share


def _mask_of(name: str, states: Tensor, inputs: Mapping[str, Any]) -> Tensor | None:
    """`[B, T, 1]`, ones for the real tokens of hidden states; None for all."""
    mask = inputs.get("attention_mask")
    if name == "decoder_hidden_states":
        mask, labels = inputs.get("decoder_attention_mask"), inputs.get("labels")
        if mask is None and labels is not None:
            mask = labels != IGNORE_INDEX
    if mask is None or mask.ndim != states.ndim - 1:
        return None
    return mask.unsqueeze(-1).to(states)


class Teacher:
    """A model that answers for a batch; it learns nothing, and is no part of the student.

    Args:
        model: in whatever mode; it is put into eval and frozen.
        with_hidden_states: whether its hidden states are wanted.
    """

    def __init__(self, model: nn.Module, *, with_hidden_states: bool):
        self.model = model.eval().requires_grad_(False)
        self.with_hidden_states = with_hidden_states

    def targets(self, inputs: Mapping[str, Any]) -> Targets:
        """What it says of the inputs of a student."""
        given = {name: value for name, value in inputs.items() if name not in _OF_THE_STUDENT}
        needs_labels = getattr(self.model.config, "is_encoder_decoder", False)
        if not needs_labels or given.get("decoder_input_ids") is not None:
            given = {k: v for k, v in given.items() if k not in _LABELS}
        if self.with_hidden_states:
            given["output_hidden_states"] = True
        device = next(self.model.parameters()).device
        given = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in given.items()}
        with torch.no_grad():
            return Targets.of(self.model(**given, return_dict=True))


_LABELS = ("labels", "start_positions", "end_positions")


def load_teacher(path: str | os.PathLike, student: PreTrainedModel) -> PreTrainedModel:
    """The model of a folder or a Hub id with the head that a student has."""
    config = student.config
    known = auto_class_names(config) if hasattr(config, "auto_classes") else {}
    auto = known.get(type(student).__name__)
    loads: Any = type(student) if auto is None else getattr(transformers, auto)
    return loads.from_pretrained(path)


def compares_hidden_states(student: Any, teacher: Any) -> bool:
    """Whether both have hidden states of one size; says once where they have not."""
    sizes = [getattr(model.config, "hidden_size", None) for model in (student, teacher)]
    if sizes[0] != sizes[1]:
        logger.warning_once(
            f"The teacher's hidden states are of size {sizes[1]}, the student's of {sizes[0]}: they are "
            "not compared (distillation_hidden_weight does nothing)."
        )
    return sizes[0] == sizes[1]
