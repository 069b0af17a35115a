"""What goes with `transformers.Trainer`: schedules, evaluation at several budgets, GLUE."""

from .budgets import evaluate_budgets, format_budget_table
from .glue_data import GLUE_TASKS, GlueTask, load_glue_tsv
from .glue_metric import GlueMetric
from .schedules import CCTNoiseCallback, cct_noise_scale

__all__ = [
    "GLUE_TASKS",
    "CCTNoiseCallback",
    "GlueMetric",
    "GlueTask",
    "cct_noise_scale",
    "evaluate_budgets",
    "format_budget_table",
    "load_glue_tsv",
]
