"""Optimiser settings of the papers whose models the gated ones extend, for `MoaTrainingArguments`.

    MoaSeq2SeqTrainingArguments("out", **translation_recipe(hidden_size=512))

Each gives a dict of arguments. What it leaves out (batch size, number of steps, dropout) is the user's.
The gates' own settings are the defaults of `MoaTrainingArguments`.
"""

from __future__ import annotations

from typing import Any


def translation_recipe(hidden_size: int = 512, warmup_steps: int = 4000) -> dict[str, Any]:
    """Adam, warm-up and decay with the inverse square root, label smoothing (Vaswani et al. 2017,
    section 5): the transformer that MAE, MoA and CCT are measured against in translation.

    The rate peaks at `(hidden_size * warmup_steps) ** -0.5` after the warm-up: 7e-4 for the base model.

    T5 from random weights is no such transformer: its embeddings start at a standard deviation of 1, and
    hardly move under Adam. Give it Adafactor with relative steps (see `docs/pretrain.md`).

    Args:
        hidden_size: d of the model.
        warmup_steps: updates of the warm-up.

    Returns:
        Arguments of `MoaTrainingArguments`.
    """
    return {
        "learning_rate": (hidden_size * warmup_steps) ** -0.5,
        "warmup_steps": warmup_steps,
        "lr_scheduler_type": "inverse_sqrt",
        "adam_beta1": 0.9,
        "adam_beta2": 0.98,
        "adam_epsilon": 1e-9,
        "weight_decay": 0.0,
        "label_smoothing_factor": 0.1,
    }


def masked_language_model_recipe() -> dict[str, Any]:
    """Adam with weight decay, warm-up over 10,000 updates, linear decay (Devlin et al. 2019, appendix
    A.2), for batches of 256 sequences."""
    return {
        "learning_rate": 1e-4,
        "warmup_steps": 10_000,
        "lr_scheduler_type": "linear",
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "weight_decay": 0.01,
    }


def causal_language_model_recipe() -> dict[str, Any]:
    """Adam, warm-up over 2,000 updates, cosine decay to zero (Radford et al. 2018, section 4.1), for
    batches of 64 sequences of 512 tokens."""
    return {
        "learning_rate": 2.5e-4,
        "warmup_steps": 2_000,
        "lr_scheduler_type": "cosine",
        "weight_decay": 0.01,
    }
