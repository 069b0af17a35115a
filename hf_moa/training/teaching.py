"""The teacher of a training run: another model, or the largest budget of the one that learns."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch import nn

from .distillation import Distillation, Targets, Teacher, compares_hidden_states, load_teacher


class Teaching:
    """What a trainer asks of its teacher.

    Args:
        teacher: a model, a path or Hub id, "self", or None.
    """

    def __init__(self, teacher: nn.Module | str | os.PathLike | None):
        if not isinstance(teacher, (nn.Module, str, os.PathLike, type(None))):
            raise ValueError(
                "teacher must be a model, the folder or Hub id of one, 'self' or None (got "
                f"{type(teacher).__name__})."
            )
        self.given = teacher
        self._teacher: Teacher | None = None
        self._distillation: Distillation | None = None
        self._targets: Targets | None = None  # of this micro-batch

    @property
    def is_self(self) -> bool:
        return isinstance(self.given, str) and self.given == "self"

    def check(self, args: Any, *, smooths_labels: bool, has_own_loss: bool) -> None:
        """Raise a ValueError for a teacher that does not go with the arguments."""
        if self.given is None:
            return
        if self.is_self and args.budget_sampling != "all":
            raise ValueError(
                "teacher='self' needs budget_sampling='all', whose largest budget teaches the others "
                f"(got {args.budget_sampling!r})."
            )
        if smooths_labels:
            raise ValueError(
                "label_smoothing_factor must be 0 with a teacher, whose probabilities are smooth labels "
                f"(got {args.label_smoothing_factor})."
            )
        if has_own_loss:
            raise ValueError("compute_loss_func must be None with a teacher, which needs the model's.")

    def begin(self, student: Any, args: Any, *, shifts_labels: bool) -> None:
        """Get ready for a run: the teacher on its device, and the loss."""
        if self.given is None:
            return
        compares = args.distillation_hidden_weight > 0
        if not self.is_self:
            given = self.given
            model: Any = given if isinstance(given, nn.Module) else load_teacher(given, student)
            if any(module is model for module in student.modules()):
                raise ValueError("teacher must be another model than the one that learns, or 'self'.")
            compares = compares and compares_hidden_states(student, model)
            self._teacher = Teacher(model.to(args.device), with_hidden_states=compares)
        self._distillation = Distillation(
            weight=args.distillation_weight,
            temperature=args.distillation_temperature,
            hidden_weight=args.distillation_hidden_weight if compares else 0.0,
            shifts_labels=shifts_labels,
        )

    def forget(self) -> None:
        """Another micro-batch follows."""
        self._targets = None

    def wanted(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of the student's call."""
        if self._distillation is None or not self._distillation.hidden_weight:
            return inputs
        return {**inputs, "output_hidden_states": True}

    def teach(self, outputs: Any, inputs: Mapping[str, Any]) -> None:
        """Put the teacher's part into the outputs' loss."""
        if self._distillation is None or outputs.get("loss") is None:
            return
        if self._teacher is not None and self._targets is None:
            self._targets = self._teacher.targets(inputs)
        if self._targets is not None:
            outputs["loss"] = self._distillation.loss(outputs, self._targets, inputs)
        else:  # the largest budget runs first, and teaches itself nothing
            self._targets = Targets.of(outputs)
