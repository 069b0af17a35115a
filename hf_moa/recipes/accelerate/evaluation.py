"""Losses of language models over the processes of an Accelerate run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import default_data_collator

from hf_moa.modeling.core.precision import in_float64
from hf_moa.modeling.core.task_losses import IGNORE_INDEX


def mean_over_labels(
    accelerator: Accelerator, model: nn.Module, loader: Iterable, shifts_labels: bool
) -> dict[str, float]:
    """The mean cross-entropy over the labels of all processes' batches, `eval_loss`, and their number,
    `eval_tokens`; of a model with CCT also its `compute_fraction`, the mean over sequences."""
    sums, fractions = [], []
    for batch in loader:
        with torch.no_grad():
            outputs = model(**batch)
        logits, labels = outputs.logits.float(), batch["labels"]
        fraction = getattr(outputs, "compute_fraction", None)
        if fraction is not None:
            fractions.append(accelerator.gather_for_metrics(fraction).cpu())
        if shifts_labels:
            logits, labels = logits[:, :-1], labels[:, 1:]
        losses = nn.functional.cross_entropy(
            logits.transpose(1, 2), labels, ignore_index=IGNORE_INDEX, reduction="none"
        )
        # shape: (B, 2), so that sequences repeated for even batches are dropped
        both = torch.stack([in_float64(x).sum(1) for x in (losses, labels != IGNORE_INDEX)], dim=1)
        sums.append(accelerator.gather_for_metrics(both).cpu())
    total, count = torch.cat(sums).sum(dim=0).tolist()
    if not count:
        raise ValueError("The validation data must have labels (got none to predict).")
    found = {"eval_loss": total / count, "eval_tokens": int(count)}
    if fractions:
        found["compute_fraction"] = torch.cat(fractions).double().mean().item()
    return found


def perplexity_of(
    accelerator: Accelerator,
    dataset: Dataset | None,
    batch_size: int,
    *,
    shifts_labels: bool,
    collate: Callable[[list], dict] = default_data_collator,
) -> Callable[[nn.Module], dict[str, float]] | None:
    """An `evaluate` for `GatedTraining`: loss and perplexity on a data set of a language model; none
    without one."""
    if dataset is None:
        return None
    loader = accelerator.prepare_data_loader(
        DataLoader(dataset, batch_size=batch_size, collate_fn=collate)
    )

    def evaluate(model: nn.Module) -> dict[str, float]:
        found = mean_over_labels(accelerator, model, loader, shifts_labels)
        loss = found["eval_loss"]
        return {**found, "perplexity": math.exp(loss) if loss < 700 else math.inf}

    return evaluate
