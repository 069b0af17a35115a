"""Schedules that follow the trainer's step count."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from accelerate.utils import extract_model_from_parallel
from torch import nn
from transformers import TrainerCallback

if TYPE_CHECKING:
    from hf_moa.gated_models import GatedPreTrainedModel

# the part of a run over which the noise of hard gates falls: the last steps train what eval computes
HARD_GATES_NOISE = 0.9


def _check_num_steps(num_steps) -> None:
    if isinstance(num_steps, bool) or not isinstance(num_steps, int) or num_steps < 1:
        raise ValueError(
            f"`num_steps` must be an integer >= 1, the optimiser steps over which the noise "
            f"changes (got {num_steps!r})."
        )


def cct_noise_scale(step: int, num_steps: int, noise_max: float, *, falls: bool = False) -> float:
    """The scale alpha of the CCT gate noise in `sigmoid(G(x) + alpha * N(0, 1))` at one step.

    It grows linearly from 0 at step 0 to `noise_max` at step `num_steps`, and stays there
    (Bapna et al. 2020); or it falls from `noise_max` to 0.

    Args:
        step: optimiser steps done so far.
        num_steps: optimiser steps over which the noise changes, >= 1.
        noise_max: the largest scale.
        falls: whether it falls. Soft gates need noise at the end, so that they learn to be 0 or 1. Hard
            gates are that from the start: noise lets them try the other choice, and with noise at the
            end a model would learn from choices that it never makes in eval.

    Raises:
        ValueError: `num_steps` is not an integer >= 1.
    """
    _check_num_steps(num_steps)
    share = min(1.0, step / num_steps)
    return noise_max * (1 - share if falls else share)


def default_noise_steps(config: Any) -> float:
    """Over how much of a run the noise changes: as `cct_noise_steps` of `MoaTrainingArguments`."""
    return HARD_GATES_NOISE if _has_hard_gates(config) else -1


def noise_steps(value: float, max_steps: int) -> int:
    """The steps over which the noise changes, in a run of `max_steps`."""
    if value == -1:
        return max_steps
    return int(value) if value >= 1 else max(1, round(value * max_steps))


def _has_hard_gates(config: Any) -> bool:
    return getattr(config, "cct_gate_training", "soft") == "hard"  # a checkpoint's code may be older


def set_cct_noise(model: nn.Module, step: int, num_steps: int) -> None:
    """Give a CCT model the noise of a step; see `cct_noise_scale`."""
    gated = cast("GatedPreTrainedModel", model)
    falls = _has_hard_gates(gated.config)
    gated.set_cct_noise_scale(cct_noise_scale(step, num_steps, gated.config.cct_noise_max, falls=falls))


def noise_in(model: nn.Module) -> dict[str, float]:
    """For a log, the noise that CCT's gates have now; nothing without such gates."""
    scales = (module.noise_scale for module in model.modules() if hasattr(module, "noise_scale"))
    scale = next(scales, None)
    return {} if scale is None else {"cct_noise_scale": float(scale)}  # type: ignore[arg-type]  # a tensor


class CCTNoiseCallback(TrainerCallback):
    """Anneals the gate noise of a CCT model while a `Trainer` trains it.

    Before every optimiser step the scale is set to
    `cct_noise_scale(state.global_step, num_steps, model.config.cct_noise_max)`: it grows, and with
    `cct_gate_training="hard"` it falls. It depends only on the step count, so a resumed run continues as
    if it had not stopped.

    Args:
        num_steps (`int`, *optional*): optimiser steps over which the noise changes; default: all
            steps of the run (`state.max_steps`), for hard gates 0.9 of them.

    Raises:
        ValueError: `num_steps` is not an integer >= 1; at the start of training, the model has no
            CCT gates.
    """

    def __init__(self, num_steps: int | None = None):
        if num_steps is not None:
            _check_num_steps(num_steps)
        self.num_steps = num_steps

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        if not getattr(extract_model_from_parallel(model).config, "cct_budgets", None):
            raise ValueError(
                "CCTNoiseCallback needs a model with CCT gates (`config.cct_budgets` set; got a "
                f"{type(model).__name__} without). Remove the callback, or switch CCT on with "
                "`upcycle(model, cct_budgets=[...])`."
            )

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        model = extract_model_from_parallel(model)
        num_steps = self.num_steps
        if num_steps is None:
            num_steps = noise_steps(default_noise_steps(model.config), state.max_steps)
        set_cct_noise(model, state.global_step, num_steps)
