"""Schedules that follow the trainer's step count."""

from typing import TYPE_CHECKING, cast

from accelerate.utils import extract_model_from_parallel
from torch import nn
from transformers import TrainerCallback

if TYPE_CHECKING:
    from hf_moa.gated_models import GatedPreTrainedModel


def _check_num_steps(num_steps) -> None:
    if isinstance(num_steps, bool) or not isinstance(num_steps, int) or num_steps < 1:
        raise ValueError(
            f"`num_steps` must be an integer >= 1, the optimiser steps over which the noise grows "
            f"(got {num_steps!r})."
        )


def cct_noise_scale(step: int, num_steps: int, noise_max: float) -> float:
    """The scale alpha of the CCT gate noise in `sigmoid(G(x) + alpha * N(0, 1))` at one step.

    It grows linearly from 0 at step 0 to `noise_max` at step `num_steps`, and stays there
    (Bapna et al. 2020).

    Args:
        step: optimiser steps done so far.
        num_steps: optimiser steps over which the noise grows, >= 1.
        noise_max: the scale at the end.

    Raises:
        ValueError: `num_steps` is not an integer >= 1.
    """
    _check_num_steps(num_steps)
    return noise_max * min(1.0, step / num_steps)


def set_cct_noise(model: nn.Module, step: int, num_steps: int) -> None:
    """Give a CCT model the noise of a step; see `cct_noise_scale`."""
    gated = cast("GatedPreTrainedModel", model)
    gated.set_cct_noise_scale(cct_noise_scale(step, num_steps, gated.config.cct_noise_max))


def noise_in(model: nn.Module) -> dict[str, float]:
    """For a log, the noise that CCT's gates have now; nothing without such gates."""
    scales = (module.noise_scale for module in model.modules() if hasattr(module, "noise_scale"))
    scale = next(scales, None)
    return {} if scale is None else {"cct_noise_scale": float(scale)}  # type: ignore[arg-type]  # a tensor


class CCTNoiseCallback(TrainerCallback):
    """Anneals the gate noise of a CCT model while a `Trainer` trains it.

    Before every optimiser step the scale is set to
    `cct_noise_scale(state.global_step, num_steps, model.config.cct_noise_max)`. It depends only on
    the step count, so a resumed run continues as if it had not stopped.

    Args:
        num_steps (`int`, *optional*): optimiser steps over which the noise grows; default: all
            steps of the run (`state.max_steps`).

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
        num_steps = state.max_steps if self.num_steps is None else self.num_steps
        set_cct_noise(model, state.global_step, num_steps)
