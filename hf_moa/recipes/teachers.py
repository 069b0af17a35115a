"""Which model a script's learns from."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel

from hf_moa.training.teachers import SELF, load_teacher

from .command_line import optional
from .models import HubArguments


@dataclass
class TeacherArguments:
    """Distillation; --distillation_weight and others say how."""

    teacher: str | None = optional(
        "Path of a finetuned model to learn from beside the labels, or its name on the Hub; self: the "
        "model's largest budget teaches the others."
    )

    def load(self, model: PreTrainedModel, hub_args: HubArguments) -> PreTrainedModel | str | None:
        """The teacher, for `MoaTrainer`.

        Args:
            model: the student, whose head it shares.
            hub_args: how models are fetched. The revision is the student's, and the teacher's is "main".

        Raises:
            ValueError: it is not finetuned: the checkpoint has no such head.
        """
        if self.teacher is None or self.teacher == SELF:
            return self.teacher
        return load_teacher(self.teacher, model, **hub_args.hub_kwargs() | {"revision": "main"})
