"""Whether an update may be made, and what is said where it may not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hf_moa.modeling.core.sharding import DTensor
from hf_moa.modeling.core.task_losses import IGNORE_INDEX

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
