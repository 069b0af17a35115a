"""How a run trains the gates: what it does where nothing is asked for, and what does not go together."""

from __future__ import annotations

from typing import Any

from torch import nn

from .gate_descent import gate_parameters


def choose_mae_training(model: nn.Module, asked: str | None, *, adapted: bool = False) -> str | None:
    """How MAE gates are trained.

    Args:
        model: a gated model, without wrappers or adapters.
        asked: "bcd", "expert" or "joint"; None leaves the choice to the model.
        adapted: the model carries PEFT adapters: there may be nothing but gates to train.

    Returns:
        One of the three; None for a model without MAE attention.
    """
    config = getattr(model, "config", None)
    if getattr(config, "attention_type", None) != "mae":
        return None
    if asked is not None:
        return asked
    if adapted:
        return "joint"
    if config.mae_gate_type == "uniform":
        return "expert"
    return "bcd" if gate_parameters(model) else "joint"


def check_mae_training(
    model: nn.Module, asked: str | None, *, chosen: str | None, engine: str | None = None
) -> None:
    """Raise a ValueError where the gates cannot be trained so.

    Args:
        model: as for `choose_mae_training`.
        asked: as for `choose_mae_training`.
        chosen: what that returned.
        engine: name of one that runs the training and cannot update gates and experts in turn.
    """
    config = getattr(model, "config", None)
    attention_type = getattr(config, "attention_type", None)
    if asked is not None and attention_type != "mae":
        raise ValueError(
            f"mae_training={asked!r} needs a model with MAE attention (got a {type(model).__name__} "
            f"with attention_type={attention_type!r}). Leave it out, or convert the model: "
            'upcycle(model, "mae").'
        )
    if chosen != "bcd":
        return
    if config.mae_gate_type == "uniform":
        raise ValueError(
            "mae_training='bcd' needs gates to train, and mae_gate_type='uniform' has none: give "
            "mae_training='expert'."
        )
    if not gate_parameters(model):
        raise ValueError(
            "mae_training='bcd' needs gates that can learn, but all are frozen (requires_grad=False). "
            "Give mae_training='joint', or keep them trainable: an FTGConfig adapter, or "
            'modules_to_save=["gate"].'
        )
    if engine is not None:
        raise ValueError(
            f"mae_training='bcd' updates gates and experts in turn, which {engine} cannot: use DDP or "
            "FSDP version 2, or mae_training='joint'."
        )


def check_noise_steps(config: Any, steps: float | None, *, required: bool = True) -> None:
    """Raise a ValueError unless `cct_noise_steps` is given for a model with CCT, and for no other.

    Args:
        config: the model's, or None.
        steps: what was given.
        required: whether it must be given.
    """
    budgets = getattr(config, "cct_budgets", None)
    if budgets is None and steps is not None:
        raise ValueError(
            f"cct_noise_steps needs a model with CCT (got {steps} and a model without cct_budgets)."
        )
    if budgets is not None and steps is None and required:
        raise ValueError(
            "cct_noise_steps must be given for a model with CCT: the optimiser steps over which the "
            f"gates' noise grows to cct_noise_max={config.cct_noise_max} (below 1, that part of the "
            "run; -1, all of it; got None)."
        )
