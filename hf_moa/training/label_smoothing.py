"""Label smoothing that keeps what else is in a model's loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_moa.modeling.core.precision import at_least_float32
from hf_moa.modeling.core.task_losses import IGNORE_INDEX, next_token_labels


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
        outputs: of the model, with `logits` `[..., classes]`, or `[n, classes]` of only the n labels
            (`sparse_prediction`); and where its `loss` includes auxiliary terms, with `task_loss`, which
            is without.
        labels: `[...]` int64; -100 is ignored.
        epsilon: the share of the uniform distribution.
        shifts_labels: the logits of a position are for the next one's label.
        num_items_in_batch: labels of the whole accumulated batch, which the sum is divided by; None: the
            labels of this one. (`nn.DataParallel` is given it once for each device.)

    Raises:
        ValueError: labels that are no classes.
    """
    if labels.is_floating_point():
        raise ValueError(
            f"label_smoothing_factor needs labels that are classes (got {labels.dtype}); set it to 0."
        )
    logits = at_least_float32(outputs["logits"])
    targets = next_token_labels(labels) if shifts_labels else labels
    targets = targets.to(logits.device)
    valid = targets != IGNORE_INDEX
    count = valid.sum() if num_items_in_batch is None else torch.as_tensor(num_items_in_batch).sum()
    if logits.ndim == targets.ndim:  # of only the labelled positions
        targets, valid = targets[valid], valid[valid]
    chosen = logits.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    smoothed = logits.logsumexp(dim=-1) - (1 - epsilon) * chosen - epsilon * logits.mean(dim=-1)
    loss = (smoothed * valid).sum() / count.to(logits.device)
    task_loss = outputs.get("task_loss")
    return loss if task_loss is None else loss + (outputs["loss"] - task_loss).mean()
