"""What the mixins of `MoaTrainer` are mixed into, for type checkers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn
    from transformers import Trainer, TrainingArguments

    from .arguments import GateTrainingArguments

    class RunArguments(GateTrainingArguments, TrainingArguments):
        """What `MoaTrainingArguments` and `MoaSeq2SeqTrainingArguments` both are, once made."""

        output_dir: str  # its `__post_init__` leaves no None

    class TrainerBase(Trainer):
        args: RunArguments
        # these are None at first or at times, or are no longer, which `Trainer` does not declare
        model_init: Any
        hp_search_backend: Any
        objective: Any
        _trial: Any

        def _gated_model(self) -> nn.Module:
            """The model itself, without wrappers or adapters."""

else:
    TrainerBase = object
