"""How a trainer distils: where the teacher's outputs come from, and how the loss is made."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn

from hf_moa.modeling.core.one_token import trains_one_token

from .distillation import Comparison, Views, hidden_error
from .random_states import kept_random_states
from .sandwich import TrainsEveryBudget
from .teacher_cache import ROW, cached_logits, numbered
from .teachers import Teacher, check_teacher, load_teacher


class Distils(TrainsEveryBudget):
    """Mixin for `Trainer`; it takes the argument `teacher`."""

    def __init__(self, *args: Any, teacher: Any = None, **kwargs: Any):
        self.teacher: Any = teacher
        self._teacher: Teacher | None = None  # of another model than the student
        self._targets: Views | None = None  # of the micro-batch, for its passes at several budgets
        self._cache: Tensor | None = None
        super().__init__(*args, **kwargs)

    def _check_teacher(self) -> None:
        """Load the teacher where it is a path; raise a ValueError where it does not go with the model
        and the arguments."""
        args, model = self.args, self._gated_model()
        args.check_distillation()
        unused = args.unused_without_teacher()
        if self.teacher is None and unused:
            given = ", ".join(f"{name}={getattr(args, name)!r}" for name in unused)
            raise ValueError(
                f"{given} needs a teacher: MoaTrainer(teacher=...). Leave it out, or give one."
            )
        if self.teacher is None:
            return
        if self.compute_loss_func is not None:
            raise ValueError(
                "teacher adds to the model's own loss, which compute_loss_func replaces: give one of "
                "them."
            )
        if self._teaches_itself():
            if args.distillation_cache:
                raise ValueError(
                    "distillation_cache needs a teacher that stays as it is (got teacher='self')."
                )
            return
        if isinstance(self.teacher, (str, os.PathLike)):
            self.teacher = load_teacher(self.teacher, model)
        if not isinstance(self.teacher, nn.Module):
            raise ValueError(
                "teacher must be a model, the path or Hub id of one, 'self' or None (got "
                f"{type(self.teacher).__name__})."
            )
        check_teacher(self.teacher, model, compares_hidden=bool(self.hidden_pairs))
        if self._teacher is None or self._teacher.model is not self.teacher:
            self._teacher = Teacher(self.teacher)

    @property
    def hidden_weight(self) -> float:
        """v of the loss: as given, or 1. With CCT it is 0 for heads that read one token: to be like the
        teacher, all other tokens would have to be computed to the end."""
        given = self.args.distillation_hidden_weight
        if given is not None:
            return given
        return 0.0 if trains_one_token(self._gated_model()) else 1.0

    @property
    def hidden_pairs(self) -> list[tuple[int, int]]:
        """The hidden states that are compared; see `DistillationArguments.hidden_pairs`."""
        return self.args.hidden_pairs() if self.hidden_weight else []

    def _begin_distillation(self) -> None:
        """At the first update of a run: the teacher goes to its device, and fills the cache."""
        self._cache = None
        if self._teacher is None:
            return
        self._teacher.to(self.args.device)
        if self.args.distillation_cache:
            with kept_random_states():
                self._cache = self._cached_logits()

    def _cached_logits(self) -> Tensor:
        collator = self._get_collator_with_removed_columns(self.data_collator)
        return cached_logits(
            numbered(self.train_dataset),
            lambda batch: self._ask(self._prepare_inputs(batch))["logits"],
            collator=collator,
            batch_size=self.args.eval_batch_size,
            process=(self.args.process_index, self.args.world_size),
            sum_over_processes=lambda x: (
                x if self.args.world_size == 1 else self.accelerator.reduce(x, reduction="sum")
            ),
        )

    def _ask(self, batch: dict[str, Any]) -> Any:
        teacher = self._teacher
        assert teacher is not None
        with self.accelerator.autocast():
            return teacher(batch, output_hidden_states=bool(self.hidden_pairs))

    # --- data ---------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> Any:
        """As in `Trainer`; examples whose logits are cached are numbered."""
        if self._teacher is None or not self.args.distillation_cache:
            return super().get_train_dataloader()
        dataset = self.train_dataset
        self.train_dataset = numbered(dataset)
        try:
            return super().get_train_dataloader()
        finally:
            self.train_dataset = dataset

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        if self.args.distillation_cache and ROW not in self._signature_columns:
            self._signature_columns.append(ROW)

    # --- the loss -----------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """As in `Trainer`; a micro-batch's passes at several budgets share the teacher's outputs."""
        self._targets = None
        try:
            return super().training_step(*args, **kwargs)
        finally:
            self._targets = None

    def _begin_lesson(self, inputs: dict[str, Any]) -> Lesson | None:
        """Ready a training batch for the model, in place; None where nothing is distilled from it."""
        rows = inputs.pop(ROW, None)
        if self.teacher is None:
            return None
        if self.hidden_pairs:
            inputs["output_hidden_states"] = True
        return Lesson(self, inputs, rows)


class Lesson:
    """What a student learns from one pass over a micro-batch.

    Args:
        trainer: whose arguments and teacher it has.
        inputs: what the student is called with.
        rows: `[B]`, the examples' numbers where logits are cached.
    """

    def __init__(self, trainer: Distils, inputs: dict[str, Any], rows: Tensor | None):
        self.trainer, self.inputs, self.rows = trainer, inputs, rows
        self.pairs = trainer.hidden_pairs
        self.comparison = Comparison(
            inputs,
            config=getattr(trainer._gated_model(), "config", None),
            shifts_labels=trainer._shifts_labels(),
        )

    def finish(self, outputs: Any, labels_loss: Tensor) -> dict[str, Tensor]:
        """Put the losses of distillation into `outputs["loss"]`.

        Args:
            outputs: of the student.
            labels_loss: that part of its loss which is of labels.

        Returns:
            The terms, unweighted, for logging.
        """
        args, trainer = self.trainer.args, self.trainer
        views = self._views(outputs, [own for own, _ in self.pairs])
        going = trainer._pass
        if trainer._teaches_itself() and going is not None and going.is_first:
            trainer._targets = views.detached()
            return {}
        targets = self._targets()
        _check_shapes(views, targets)
        terms = {
            "logits_loss": self.comparison.divergence(views, targets, args.distillation_temperature)
        }
        loss = outputs["loss"].mean()
        loss = loss + args.distillation_weight * (terms["logits_loss"] - labels_loss)
        if self.pairs:
            masks = self.comparison.masks(outputs, self.pairs)
            errors = [
                hidden_error(h, t, mask)
                for h, t, mask in zip(views.hidden, targets.hidden, masks, strict=True)
            ]
            terms["hidden_loss"] = self.comparison.part(torch.stack(errors).mean())
            loss = loss + trainer.hidden_weight * terms["hidden_loss"]
        outputs["loss"] = loss
        return terms

    def _targets(self) -> Views:
        trainer = self.trainer
        if trainer._targets is not None:
            return trainer._targets
        if trainer._cache is not None and self.rows is not None:
            return Views((trainer._cache[self.rows],), ())
        targets = self._views(trainer._ask(self.inputs), [theirs for _, theirs in self.pairs])
        if trainer._pass is not None:
            trainer._targets = targets
        return targets

    def _views(self, outputs: Any, layers: list[int]) -> Views:
        if not isinstance(outputs, dict):
            raise ValueError(
                f"teacher needs outputs by name (got a {type(outputs).__name__}): leave return_dict "
                "True."
            )
        try:
            return self.comparison.views(outputs, layers)
        except IndexError as error:
            raise ValueError(
                f"distillation_hidden_states must name layers that there are (got {layers}): {error}."
            ) from error


def _check_shapes(student: Views, teacher: Views) -> None:
    for name, own, others in (
        ("logits", student.logits, teacher.logits),
        ("hidden states", student.hidden, teacher.hidden),
    ):
        for x, y in zip(own, others, strict=True):
            if x.shape != y.shape:
                raise ValueError(
                    f"teacher's {name} must be of the model's shape, {tuple(x.shape)} (got "
                    f"{tuple(y.shape)}): the same classes, tokenizer and length."
                    + (" Or set distillation_hidden_weight to 0." if name != "logits" else "")
                )
