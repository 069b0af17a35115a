"""Task losses of the heads that transformers' own functions do not give as we need them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .precision import at_least_float32

IGNORE_INDEX = -100


def token_loss(logits: Tensor, labels: Tensor, *, num_items_in_batch=None) -> Tensor:
    """Cross-entropy over the labelled tokens, in float32 at least.

    Args:
        logits: `[..., classes]`.
        labels: `[...]` int64; -100 is ignored.
        num_items_in_batch: labelled tokens of the whole accumulated batch. With it the loss is this
            call's part of that batch's mean; without it, the mean over this call.
    """
    logits = at_least_float32(logits).flatten(0, -2)
    labels = labels.flatten().to(logits.device)
    if num_items_in_batch is None:
        return nn.functional.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX)
    total = nn.functional.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum")
    return total / torch.as_tensor(num_items_in_batch, device=total.device)


def token_share(labels: Tensor | None, num_items_in_batch=None) -> Tensor | float:
    """What part of the accumulated batch's labelled tokens this call holds; 1 without accumulation."""
    if labels is None or num_items_in_batch is None:
        return 1.0
    local = (labels != IGNORE_INDEX).sum()
    return local / torch.as_tensor(num_items_in_batch, device=local.device)


def labelled_only(hidden_states: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """`[B, T, d]` and `[B, T]` -> `[n, d]` and `[n]`: the n positions that have a label."""
    labels = labels.to(hidden_states.device)
    has_label = labels != IGNORE_INDEX
    return hidden_states[has_label], labels[has_label]


def next_token_labels(labels: Tensor) -> Tensor:
    """Labels of a causal language model: each position's is the token after it, the last has none."""
    return nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)


def up_to_last_label(labels: Tensor) -> Tensor:
    """`[B, T]` bool: the positions up to the last that has a label."""
    labelled = (labels != IGNORE_INDEX).long()
    return labelled.flip(1).cummax(dim=1).values.flip(1).bool()
