"""Label smoothing that keeps what else is in a model's loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_moa.modeling.precision import at_least_float32
from hf_moa.modeling.task_losses import IGNORE_INDEX, next_token_labels


def smoothed_loss(
    outputs: Any,
    labels: Tensor,
    *,
    epsilon: float,
    shifts_labels: bool,
    num_items_in_batch: Tensor | int | None,
) -> Tensor:
    """`(1 - epsilon) * cross-entropy + epsilon * mean over classes of -log p`, and the auxiliary terms.

    Args:
        outputs: of the model, with `loss`, its mean cross-entropy over the labels (and auxiliary terms,
            where `task_loss` is without them), and `logits` `[..., classes]`.
        labels: `[...]` int64; -100 is ignored.
        epsilon: the share of the uniform distribution.
        shifts_labels: the logits of a position are for the next one's label.
        num_items_in_batch: what the model divided the sum over labels by; None: by their number.

    Raises:
        ValueError: labels that are no classes.
    """
    if labels.is_floating_point():
        raise ValueError(
            f"label_smoothing_factor needs labels that are classes (got {labels.dtype}); set it to 0."
        )
    logits = at_least_float32(outputs["logits"])
    targets = next_token_labels(labels) if shifts_labels else labels
    valid = (targets != IGNORE_INDEX).to(logits.device)
    count = valid.sum() if num_items_in_batch is None else torch.as_tensor(num_items_in_batch)
    # -log p averaged over the classes
    spread = logits.logsumexp(dim=-1) - logits.mean(dim=-1)
    uniform = (spread * valid).sum() / count.to(logits.device)
    loss = outputs["loss"]
    task_loss = outputs.get("task_loss", loss)
    return loss + epsilon * (uniform - task_loss)
