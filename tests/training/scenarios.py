"""Runs that two processes and one do alike."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from training_runs import PLAIN_SGD, build


@dataclass(frozen=True)
class Scenario:
    """A run of two updates.

    `compared`: what 2 processes x 4 rows and 1 x 8 give alike: all, where nothing is drawn; the gates'
    parameters, where others are drawn through; nothing.
    """

    backbone: str
    fields: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    compared: str = "all"
    moves_gates: bool = False
    uneven: bool = False  # rows of several lengths
    teacher: str | None = None  # "other" for another model


# Small steps, so that the second update does not blow up the first one's rounding.
SETTINGS = PLAIN_SGD | {"learning_rate": 0.01, "max_steps": 2}
MAE = {"attention_type": "mae"}
# f of the balance loss over both processes; the other losses are means over tokens
MOA = {"attention_type": "moa", "ffn_type": "moe", "router_balance_loss_coef": 1.0}
# nothing is drawn
BUDGETS = {"cct_budgets": [1, 0.5], "cct_noise_max": 0.0, "cct_budget_loss_coef": 0.0}
JOINT = {"mae_training": "joint"}
# how gates are trained does not depend on the backbone
OF_BERT = (
    "gates",
    "bcd-own-norm",
    "experts",
    "find-unused",
    "taught-hidden",
    "taught-cache",
    "all-budgets-accumulated",
)
SCENARIOS = {
    f"{backbone}-{name}": Scenario(backbone, **settings)
    for backbone in ("bert", "bert-lm", "gpt2", "t5")
    for name, settings in {
        "mha": {},
        "joint": {"fields": MAE, "arguments": JOINT, "moves_gates": True},
        "bcd": {"fields": MAE, "compared": "none", "moves_gates": True},
        "gates": {  # experts stand still
            "fields": MAE,
            "arguments": {"learning_rate": 0.0, "gate_learning_rate": 0.01},
            "compared": "gates",
            "moves_gates": True,
        },
        "bcd-own-norm": {
            "fields": MAE,
            "arguments": {"sync_gate_norm": False},
            "compared": "none",
            "moves_gates": True,
        },
        "experts": {
            "fields": MAE,
            "arguments": {"mae_training": "expert", "optim": "adamw_torch", "weight_decay": 0.5},
            "compared": "none",
        },
        "moa": {"fields": MOA, "arguments": {"router_global_balance": True}},
        "moa-uneven": {  # a mean over the tokens of both processes
            "fields": {
                "attention_type": "moa",
                "router_balance_loss_coef": 0.0,
                "router_z_loss_coef": 1.0,
            },
            "uneven": True,
        },
        "moa-noisy": {
            "fields": {**MOA, "router_type": "noisy_topk", "router_load_loss_coef": 0.1},
            "compared": "none",
        },
        "find-unused": {  # the default of `Trainer`
            "fields": MAE,
            "arguments": {"ddp_find_unused_parameters": None},
            "compared": "none",
            "moves_gates": True,
        },
        "cct": {"fields": {**MAE, "cct_budgets": [1, 0.5]}, "compared": "none",
                "moves_gates": True},
        # hidden states are ratios of each process's batch
        "taught": {"arguments": {"distillation_hidden_weight": 0.0}, "uneven": True,
                   "teacher": "other"},
        "taught-hidden": {"compared": "none", "teacher": "other"},
        "taught-cache": {
            "arguments": {"distillation_hidden_weight": 0.0, "distillation_cache": True},
            "teacher": "other",
        },
        "all-budgets": {"fields": BUDGETS, "arguments": {"budget_sampling": "all"}},
        "all-budgets-accumulated": {
            "fields": BUDGETS,
            "arguments": {
                "budget_sampling": "all",
                "gradient_accumulation_steps": 2,
                "per_device_train_batch_size": 2,
            },
        },
        "self": {"fields": BUDGETS, "arguments": {"distillation_hidden_weight": 0.0},
                 "teacher": "self"},
    }.items()
    if backbone == "bert" or name not in OF_BERT
}  # fmt: skip


def teacher_of(scenario: Scenario) -> Any:
    """The model that a scenario's learns from."""
    return build(scenario.backbone, seed=5) if scenario.teacher == "other" else scenario.teacher
