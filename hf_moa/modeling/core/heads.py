"""The heads that all families share, written once: classifiers of sequences and tokens, and of spans.

A family's class names its base model's inputs and its output, and builds what is its own: the base model
and the classifier, under the names that transformers' class has.

    class MoaBertForTokenClassification(TokenClassification, MoaBertPreTrainedModel):
        head_inputs = ("input_ids", "attention_mask", ...)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor, nn
from transformers.loss.loss_utils import ForQuestionAnsweringLoss, ForSequenceClassificationLoss
from transformers.utils import logging
from transformers.utils.generic import TransformersKwargs, can_return_tuple

from ..cache.naming import takes_cache_by_any_name
from ..mae.gate_phase import only_gates_learn_in_gate_phase
from .mixins import ModelMixin
from .one_token import OneToken, may_compute_one_token, of_token
from .outputs import (
    MoaQuestionAnsweringOutput,
    MoaSequenceClassifierOutput,
    MoaSequenceClassifierOutputWithPast,
    MoaTokenClassifierOutput,
    batch_term,
)
from .task_losses import token_loss, token_share

logger = logging.get_logger(__name__)


class TaskHead(ModelMixin):
    """A model with a head on its base model.

    Attributes:
        head_inputs: the base model's arguments that the head takes by position, in this order; all its
            others by name.
        reads_one_token: whether it reads one token of each sequence; see `may_compute_one_token`.
        output_class: of what it returns.
    """

    head_inputs: ClassVar[tuple[str, ...]] = ()
    reads_one_token: ClassVar[bool] = False
    output_class: ClassVar[type]
    # what the base model is called with where there are labels
    inputs_with_labels: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        if "head_inputs" in vars(cls):
            cls.forward = _with_inputs(cls.forward, cls.head_inputs)

    def base_outputs(self, **inputs: Any) -> Any:
        """What the base model returns."""
        return getattr(self, self.base_model_prefix)(**inputs, return_dict=True)

    def head_output(self, outputs: Any, loss: Tensor | None, share: Any = 1.0, **own: Any) -> Any:
        """The head's output: its `own` fields, and those of the base model's that it has, too.

        Args:
            outputs: of the base model.
            loss: the task's; None without labels.
            share: see `GatedModel._with_aux_loss`.
        """
        return output_of(self, self.output_class, outputs, loss, share, **own)


def output_of(
    model: Any, output_class: Any, outputs: Any, loss: Tensor | None, share: Any = 1.0, **own: Any
) -> Any:
    """See `TaskHead.head_output`."""
    loss = model._with_aux_loss(loss, outputs, share)
    names = [name for name in output_class.__dataclass_fields__ if name not in own and name != "loss"]
    return output_class(loss=loss, **own, **{name: batch_term(outputs, name) for name in names})


def _with_inputs(forward: Callable, head_inputs: tuple[str, ...]) -> Callable:
    """A head's `forward`, which shows the base model's arguments and takes them by position, too."""

    @wraps(forward)
    def wrapper(self, *args: Any, **kwargs: Any) -> Any:
        return forward(self, **dict(zip(positional, args, strict=False)), **kwargs)

    itself, *own, others = inspect.signature(forward).parameters.values()
    inputs = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)
        for name in head_inputs
    ]
    own = [parameter.replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD) for parameter in own]
    others = others.replace(name="kwargs", annotation=Unpack[TransformersKwargs])
    positional = [parameter.name for parameter in (*inputs, *own)]
    shown = inspect.Signature([itself, *inputs, *own, others])
    wrapper.__signature__ = shown  # type: ignore[attr-defined]  # for `inspect`
    return takes_cache_by_any_name(wrapper) if "cache" in head_inputs else wrapper


class SequenceClassification(TaskHead):
    """A head that classifies (or regresses) a sequence. A family implements `pooled_logits`."""

    accepts_loss_kwargs = False  # the loss is a mean over sequences
    output_class: ClassVar[type] = MoaSequenceClassifierOutput

    def only_token_read(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The `last_layer_token` that is all that `pooled_logits` reads; nothing where it reads more."""
        return {}

    def pooled_logits(self, outputs: Any, inputs: dict[str, Any]) -> Tensor:
        """`[B, classes]` of the base model's outputs for these inputs."""
        raise NotImplementedError

    @only_gates_learn_in_gate_phase
    @can_return_tuple
    def forward(self, *, labels: Tensor | None = None, **inputs: Any) -> Any:
        """The base model's arguments, and:

        Args:
            labels: `[B]` int64 classes, `[B]` floats for regression, or `[B, classes]` floats for
                several labels at once (`config.problem_type`).
        """
        if labels is not None:
            inputs |= self.inputs_with_labels
        if may_compute_one_token(self, inputs):
            inputs |= self.only_token_read(inputs)
        outputs = self.base_outputs(**inputs)
        logits = self.pooled_logits(outputs, inputs)
        loss = None
        if labels is not None:
            loss = ForSequenceClassificationLoss(labels, logits, self.config)
        return self.head_output(outputs, loss, logits=logits)


class LastTokenClassification(SequenceClassification):
    """A decoder's: it classifies the last token that is not padding, by its `score`."""

    output_class: ClassVar[type] = MoaSequenceClassifierOutputWithPast
    score: nn.Module

    def pooled_logits(self, outputs: Any, inputs: dict[str, Any]) -> Tensor:
        logits = self.score(outputs.last_hidden_state)
        if inputs.get("last_layer_token") is None:
            logits = of_token(OneToken.of(self.last_token(**inputs), logits), logits)
        return logits[:, 0]

    def last_token(
        self, *, input_ids: Tensor | None = None, inputs_embeds: Any = None, **others: Any
    ) -> Tensor | int:
        """Position of the last token of each sequence that is not padding, left or right.

        Raises:
            ValueError: several sequences, and no `config.pad_token_id`.
        """
        pad = self.config.pad_token_id
        if pad is None:
            if (batch_size := len(inputs_embeds if input_ids is None else input_ids)) != 1:
                raise ValueError(
                    "config.pad_token_id must be set for a batch of several sequences, so that the "
                    f"last token of each can be found (got None for {batch_size} sequences)."
                )
            return -1
        if input_ids is None:
            logger.warning_once(
                f"{type(self).__name__} cannot tell padding in inputs_embeds: it classifies the last "
                "position of every sequence."
            )
            return -1
        positions = torch.arange(input_ids.shape[-1], device=input_ids.device)
        return (positions * (input_ids != pad)).argmax(dim=-1)


class TokenClassification(TaskHead):
    """A head that classifies each token, with `dropout` and `classifier`."""

    output_class: ClassVar[type] = MoaTokenClassifierOutput
    dropout: nn.Module
    classifier: nn.Module

    @only_gates_learn_in_gate_phase
    @can_return_tuple
    def forward(
        self,
        *,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **inputs: Any,
    ) -> MoaTokenClassifierOutput:
        """The base model's arguments, and:

        Args:
            labels: `[B, T]` int64 classes; -100 is ignored.
            num_items_in_batch: labelled tokens of the whole accumulated batch, as `Trainer` gives it.
        """
        outputs = self.base_outputs(**inputs)
        logits = self.classifier(self.dropout(outputs.last_hidden_state))
        loss = None
        if labels is not None:
            loss = token_loss(logits, labels, num_items_in_batch=num_items_in_batch)
        share = token_share(labels, num_items_in_batch)
        return self.head_output(outputs, loss, share, logits=logits)


class QuestionAnswering(TaskHead):
    """A head that classifies spans, with `qa_outputs`: start and end of the answer."""

    accepts_loss_kwargs = False  # the loss is a mean over sequences
    output_class: ClassVar[type] = MoaQuestionAnsweringOutput
    qa_outputs: nn.Module

    @only_gates_learn_in_gate_phase
    @can_return_tuple
    def forward(
        self,
        *,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        **inputs: Any,
    ) -> Any:
        """The base model's arguments, and:

        Args:
            start_positions, end_positions: `[B]` int64, the answer's first and last token; positions
                outside the sequence are ignored.
        """
        if start_positions is not None and end_positions is not None:
            inputs |= self.inputs_with_labels
        outputs = self.base_outputs(**inputs)
        start_logits, end_logits = self.qa_outputs(outputs.last_hidden_state).unbind(dim=-1)
        start_logits, end_logits = start_logits.contiguous(), end_logits.contiguous()
        loss = ForQuestionAnsweringLoss(start_logits, end_logits, start_positions, end_positions)
        return self.head_output(outputs, loss, start_logits=start_logits, end_logits=end_logits)
