"""What the mixins of `MoaTrainer` are mixed into, for type checkers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import Trainer, TrainingArguments

    from .arguments import GateTrainingArguments
    from .distillation_arguments import DistillationArguments
    from .gate_descent import BlockCoordinateDescent
    from .step_statistics import StepStatistics

    class RunArguments(GateTrainingArguments, DistillationArguments, TrainingArguments):
        """What `MoaTrainingArguments` and `MoaSeq2SeqTrainingArguments` both are, once made."""

        output_dir: str  # its `__post_init__` leaves no None

    class TrainerBase(Trainer):
        args: RunArguments
        # these are None at first or at times, or are no longer, which `Trainer` does not declare
        model_init: Any
        hp_search_backend: Any
        objective: Any
        _trial: Any
        teacher: Any
        _descent: BlockCoordinateDescent | None
        _epoch: int
        _statistics: StepStatistics
        _signature_columns: Any

        def _gated_model(self) -> nn.Module:
            """The model itself, without wrappers or adapters."""

        def _shifts_labels(self) -> bool:
            """Whether the logits of a position are for the next one's label."""

        def _sum_over_processes(self, x: Tensor) -> Tensor: ...

else:
    TrainerBase = object
