"""Training: `MoaTrainer`, block coordinate descent, schedules, evaluation at several budgets, GLUE.

What is GLUE's needs the extra `train`, and is imported when it is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .arguments import MoaSeq2SeqTrainingArguments, MoaTrainingArguments
from .budgets import evaluate_budgets, format_budget_table
from .checkpoints import written_whole
from .gate_descent import (
    BlockCoordinateDescent,
    NonFiniteGradientError,
    gate_parameters,
    other_parameters,
)
from .label_smoothing import smoothed_loss
from .parameter_groups import parameter_groups
from .recipes import (
    causal_language_model_recipe,
    masked_language_model_recipe,
    translation_recipe,
)
from .schedules import CCTNoiseCallback, cct_noise_scale
from .trainer import MoaSeq2SeqTrainer, MoaTrainer, TrainingDivergedError

if TYPE_CHECKING:
    from .glue_data import GLUE_TASKS, GlueTask, load_glue_tsv
    from .glue_metric import GlueMetric

__all__ = [
    "GLUE_TASKS",
    "BlockCoordinateDescent",
    "CCTNoiseCallback",
    "GlueMetric",
    "GlueTask",
    "MoaSeq2SeqTrainer",
    "MoaSeq2SeqTrainingArguments",
    "MoaTrainer",
    "MoaTrainingArguments",
    "NonFiniteGradientError",
    "TrainingDivergedError",
    "causal_language_model_recipe",
    "cct_noise_scale",
    "evaluate_budgets",
    "format_budget_table",
    "gate_parameters",
    "load_glue_tsv",
    "masked_language_model_recipe",
    "other_parameters",
    "parameter_groups",
    "smoothed_loss",
    "translation_recipe",
    "written_whole",
]


def __getattr__(name: str) -> Any:
    if "glue" not in name.lower() or name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(".glue_metric" if name == "GlueMetric" else ".glue_data", __name__)
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
