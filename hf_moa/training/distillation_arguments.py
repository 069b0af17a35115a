"""How `MoaTrainer` distils and samples budgets: fields of `MoaTrainingArguments`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

BUDGET_SAMPLINGS = ("draw", "all")


@dataclass
class DistillationArguments:
    """How a model learns from a teacher, and from which budgets; see `MoaTrainingArguments`."""

    budget_sampling: str | None = field(
        default=None,
        metadata={
            "help": "Models with budgets: draw (a training step draws budgets from the config's list) "
            "or all (every budget in every step, one after the other). Default: draw; all where the "
            "teacher is the model itself.",
            "choices": BUDGET_SAMPLINGS,
        },
    )
    distillation_weight: float = field(
        default=0.5,
        metadata={"help": "With a teacher: w of (1 - w) * loss of the labels + w * loss of the logits."},
    )
    distillation_temperature: float = field(
        default=2.0, metadata={"help": "With a teacher: what both models' logits are divided by."}
    )
    distillation_hidden_weight: float | None = field(
        default=None,
        metadata={
            "help": "With a teacher: weight of the hidden states' relative error; 0 for none. Default: "
            "1; 0 for sequence classifiers with CCT."
        },
    )
    distillation_hidden_states: list[str] | None = field(
        default=None,
        metadata={
            "help": "With a teacher: which hidden states, 0 for the embeddings, -1 for the last "
            "layer's; student:teacher where they differ, such as 1:2 2:4. Default: -1."
        },
    )
    distillation_cache: bool = field(
        default=False,
        metadata={
            "help": "With a teacher: compute its logits for the training data once, and keep them. For "
            "classification and regression, without hidden states."
        },
    )

    def check_distillation(self) -> None:
        """Raise a ValueError for a value that breaks its rule (as one set later may)."""
        if self.budget_sampling not in (None, *BUDGET_SAMPLINGS):
            choices = ", ".join(map(repr, BUDGET_SAMPLINGS))
            raise ValueError(
                f"budget_sampling must be {choices} or None (got {self.budget_sampling!r})."
            )
        self._check_number("distillation_weight", "in [0, 1]", lambda x: 0 <= x <= 1)
        self._check_number("distillation_temperature", "above 0", lambda x: x > 0)
        if self.distillation_hidden_weight is not None:
            self._check_number("distillation_hidden_weight", "of at least 0", lambda x: x >= 0)
        if not isinstance(self.distillation_cache, bool):
            raise ValueError(
                f"distillation_cache must be True or False (got {self.distillation_cache!r})."
            )
        self.hidden_pairs()
        if self.distillation_cache and self.distillation_hidden_weight != 0:
            raise ValueError(
                "distillation_cache keeps only logits: a sequence's hidden states are thousands of "
                "numbers. Set distillation_hidden_weight to 0 (got "
                f"{self.distillation_hidden_weight!r}), or leave the cache out."
            )

    def _check_number(self, name: str, rule: str, holds: Any) -> None:
        value = getattr(self, name)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)
        if not is_number or not holds(value):
            raise ValueError(f"{name} must be a number {rule} (got {value!r}).")

    def hidden_pairs(self) -> list[tuple[int, int]]:
        """The hidden states that are compared, where any are: of the student, and of the teacher.

        Raises:
            ValueError: `distillation_hidden_states` holds something else.
        """
        given: Any = self.distillation_hidden_states
        given = [-1] if given is None else given
        try:
            is_list = isinstance(given, Iterable) and not isinstance(given, str)
            pairs = [_pair(each) for each in given] if is_list else []
        except ValueError:
            pairs = []
        if not pairs:
            raise ValueError(
                "distillation_hidden_states must be a list of layers such as -1, or of a student's and "
                f"a teacher's such as '1:2' (got {given!r})."
            )
        return pairs

    def unused_without_teacher(self) -> list[str]:
        """The fields that are not at their defaults, and need a teacher."""
        names = [name for name in DistillationArguments.__dataclass_fields__ if name.startswith("dist")]
        defaults = {name: DistillationArguments.__dataclass_fields__[name].default for name in names}
        return [name for name in names if getattr(self, name) != defaults[name]]


def _pair(given: Any) -> tuple[int, int]:
    parts = given.split(":") if isinstance(given, str) else [given]
    if any(isinstance(part, (bool, float)) for part in parts) or len(parts) > 2:
        raise ValueError
    return int(parts[0]), int(parts[-1])
