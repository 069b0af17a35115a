"""Whether an update may be made, and what is said where it may not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_moa.modeling.core.sharding import DTensor
from hf_moa.modeling.core.task_losses import IGNORE_INDEX

from .trainer_base import TrainerBase


class TrainingDivergedError(ArithmeticError):
    """The loss or its gradients are infinite or no numbers. The model was saved, with the parameters
    that it had before the update. (Running statistics, of gates too, may have seen its batch.)"""


NO_LABELS = (
    "There is no label to learn from: all are -100, and the loss is a mean over none. Leave such "
    "sequences out of the data, or put them in batches with others."
)


def what_is_not_finite(
    norm: Tensor | float | None,
    losses_are_finite: Tensor,
    *,
    sum_over_processes: Callable[[Tensor], Tensor],
    scales: bool = False,
) -> str | None:
    """What of an update is infinite or no number, on any process: a sentence, or None.

    The processes ask together. They exchange two numbers, and each waits for its device once.

    Args:
        norm: of the gradients; None where it is not known.
        losses_are_finite: bool scalar, of this process's micro-batches.
        sum_over_processes: of a tensor.
        scales: a `GradScaler` is at work, which skips updates with infinite gradients itself.
    """
    norm = torch.as_tensor(0.0 if norm is None or scales else norm)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    flags = [norm.detach().isfinite().all(), losses_are_finite]
    finite = torch.stack([each.to(losses_are_finite.device) for each in flags])
    bad_norm, bad_loss = sum_over_processes((~finite).float()).tolist()
    found = []
    if bad_loss:
        found.append("The loss is infinite or no number.")
    if bad_norm:
        found.append(f"The norm of the gradients is {float(norm)}.")
    return " ".join(found) or None


def lacks_labels(batches: list[Mapping[str, Any]], count: Tensor | int | None) -> bool:
    """Whether the loss of an accumulated batch is a mean over no labels.

    Args:
        batches: its micro-batches.
        count: labels of all; None where each micro-batch's loss is a mean of its own.
    """
    if count is not None:
        return float(torch.as_tensor(count).sum()) == 0
    labels = [batch.get("labels") for batch in batches]
    return any(
        torch.is_tensor(each) and not each.is_floating_point() and bool((each == IGNORE_INDEX).all())
        for each in labels
    )


def named_losses(losses: Mapping[str, Tensor]) -> str:
    """For messages: "task_loss 1.234, loss nan"."""
    return ", ".join(f"{name} {float(value):.4g}" for name, value in losses.items()) or "none"


class StopsDivergedRuns(TrainerBase):
    """Mixin for `Trainer`: a run whose loss or gradients are not finite ends, and its model is saved."""

    _loss_is_finite: Tensor | bool
    _update: tuple[list, Any]  # its micro-batches, and how many labels they have

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        # The same on all processes, and before the update. A scaler skips infinite gradients itself.
        grad_norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        found = what_is_not_finite(
            grad_norm,
            torch.as_tensor(self._loss_is_finite, device=self.args.device),
            sum_over_processes=self._sum_over_processes,
            scales=getattr(self.accelerator, "scaler", None) is not None,
        )
        if found is not None:
            self._stop_diverged("an update", found)
        return grad_norm

    def _stop_diverged(self, what: str, found: object) -> None:
        """Save the model beside the checkpoints, so that no resumption picks it, and raise."""
        if self._descent is not None:
            self._descent.take_gate_step_back()
        folder = Path(self._get_output_dir(self._trial), f"diverged-{self.state.global_step}")
        if self.args.should_save:
            folder.mkdir(parents=True, exist_ok=True)
        if self.is_fsdp_enabled:  # also where checkpoints are sharded
            self._save(str(folder), state_dict=self.accelerator.get_state_dict(self.model))
        else:
            self.save_model(str(folder), _internal_call=True)  # and no push to the Hub
        if self.args.should_save:
            self.state.save_to_json(str(folder / "trainer_state.json"))
        parts = self._statistics.latest
        where = f"{what} at step {self.state.global_step} (epoch {self._epoch})"
        saved = f"The model with the parameters that it had before this update is in {folder}."
        if lacks_labels(*self._update):
            raise TrainingDivergedError(f"Training stopped in {where}. {NO_LABELS} {saved}")
        raise TrainingDivergedError(
            f"Training diverged in {where}. {found} Last losses: {named_losses(parts)}. {saved} "
            "Try a lower learning_rate or more warmup_steps"
            + ("; a lower gate_learning_rate" if self._descent is not None else "")
            + ("; a larger router_z_loss_coef" if "router_z_loss" in parts else "")
            + ("; bf16 instead of fp16." if self.args.fp16 else ".")
        )
