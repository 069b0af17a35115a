"""How a run trains the gates: what it does where nothing is asked for, and what does not go together."""

from __future__ import annotations

from typing import Any

from torch import nn

from .gate_descent import gate_parameters, other_parameters
from .schedules import default_noise_steps


def choose_mae_training(model: nn.Module, asked: str | None, *, adapted: bool = False) -> str | None:
    """How MAE gates are trained.

    Args:
        model: a gated model, without wrappers or adapters.
        asked: "bcd", "expert" or "joint"; None leaves the choice to the model.
        adapted: the model carries PEFT adapters: there may be nothing but gates to train.

    Returns:
        One of the three; None for a model without MAE attention.
    """
    config: Any = getattr(model, "config", None)
    if getattr(config, "attention_type", None) != "mae":
        return None
    if asked is not None:
        return asked
    if adapted or not other_parameters(model):
        return "joint"
    if config.mae_gate_type == "uniform":
        return "expert"
    return "bcd" if gate_parameters(model) else "joint"


def check_mae_training(
    model: nn.Module,
    asked: str | None,
    *,
    chosen: str | None,
    adapted: bool = False,
    engine: str | None = None,
) -> None:
    """Raise a ValueError where the gates cannot be trained so.

    Args:
        model: as for `choose_mae_training`.
        asked: as for `choose_mae_training`.
        chosen: what that returned.
        adapted: as for `choose_mae_training`.
        engine: name of one that runs the training and cannot update gates and experts in turn.
    """
    config: Any = getattr(model, "config", None)
    attention_type = getattr(config, "attention_type", None)
    if asked is not None and attention_type != "mae":
        raise ValueError(
            f"mae_training={asked!r} needs a model with MAE attention (got a {type(model).__name__} "
            f"with attention_type={attention_type!r}). Leave it out, or convert the model: "
            'upcycle(model, "mae").'
        )
    if chosen == "expert" and adapted and gate_parameters(model):
        raise ValueError(
            "mae_training='expert' trains no gate, and the model's adapter has gates to train: give "
            "mae_training='joint' or 'bcd', or an adapter without gates."
        )
    if chosen in ("bcd", "expert") and gate_parameters(model) and not other_parameters(model):
        raise ValueError(
            f"mae_training={chosen!r} needs more than gates to train, but all else is frozen "
            "(requires_grad=False). Give mae_training='joint', which then trains only the gates."
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
            "Give mae_training='joint', or keep them trainable beside the rest: FTGConfig(plus=True), "
            'or modules_to_save=["gate"] of another adapter.'
        )
    if engine is not None:
        raise ValueError(
            f"mae_training='bcd' updates gates and experts in turn, which {engine} cannot: use DDP or "
            "FSDP version 2, or mae_training='joint'."
        )


def choose_noise_steps(
    model: nn.Module, asked: float | None, *, by_callback: bool = False
) -> float | None:
    """The `cct_noise_steps` of a run.

    Args:
        model: without wrappers or adapters.
        asked: what was given; None is -1, the whole run, for soft gates, and for hard ones 0.9 of it, so
            that the last steps have no noise.
        by_callback: a `CCTNoiseCallback` sets the noise.

    Returns:
        None for a model without CCT, and where the callback sets the noise.
    """
    if by_callback or not _has_cct(model):
        return None
    config: Any = model.config
    return default_noise_steps(config) if asked is None else asked


def check_noise_steps(model: nn.Module, asked: float | None, *, by_callback: bool = False) -> None:
    """Raise a ValueError where `cct_noise_steps` is given and would do nothing.

    Args:
        model, asked, by_callback: as for `choose_noise_steps`.
    """
    if asked is not None and not _has_cct(model):
        raise ValueError(
            f"cct_noise_steps needs a model with CCT (got {asked} and a model without cct_budgets)."
        )
    if asked is not None and by_callback:
        raise ValueError(
            f"cct_noise_steps must be None beside a CCTNoiseCallback, which sets the gates' noise, too "
            f"(got {asked}): give one of them."
        )


def _has_cct(model: nn.Module) -> bool:
    return getattr(getattr(model, "config", None), "cct_budgets", None) is not None
