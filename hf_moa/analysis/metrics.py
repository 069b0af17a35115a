"""What the gates are worth: loss and accuracy at each budget, and with one expert per layer."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from hf_moa.eval_mode import in_eval_mode
from hf_moa.gated_models import gated_model_of, is_instance_by_name
from hf_moa.modeling.mae.mixture import MixtureOfHeads

from .budget_names import budget_name
from .plots import plot_budget_metrics, plot_selection
from .sections import Section, whole


@torch.inference_mode()
def evaluate(
    model: nn.Module, batches: Iterable[Mapping[str, Tensor]], *, budget: Any = None
) -> dict[str, float]:
    """Mean loss over all labels, and what follows from it.

    Args:
        model: with a head; its mode is eval meanwhile.
        batches: arguments of the model, `labels` among them.
        budget: of CCT; None for the model's default.

    Returns:
        `loss`; `perplexity` of language models (the exponential of the loss); `accuracy` of classifiers,
        of tokens too.

    Raises:
        ValueError: a batch without labels, or no labels at all.
    """
    device = next(model.parameters()).device
    total, count, right, classified = 0.0, 0, 0, 0
    is_language_model = gated_model_of(model).get_output_embeddings() is not None
    with in_eval_mode(model):
        for batch in batches:
            batch = {name: value.to(device) for name, value in batch.items()}
            if batch.get("labels") is None:
                raise ValueError(f"every batch must hold labels (got {', '.join(batch)}).")
            labels = batch["labels"]
            outputs = model(**batch, **({} if budget is None else {"budget": budget}), return_dict=True)
            # causal models predict no first token
            counted = (labels[:, 1:] if _is_causal(model) else labels) != -100
            weight = len(labels) if labels.is_floating_point() else int(counted.sum())
            is_classifier = not is_language_model and not labels.is_floating_point()
            if is_classifier and outputs.logits.shape[-1] > 1:
                right += int((outputs.logits.argmax(dim=-1) == labels)[counted].sum())
                classified += int(counted.sum())
            if weight:
                total += outputs.loss.item() * weight
                count += weight
    if not count:
        raise ValueError("batches must hold at least one label (got none).")
    found = {"loss": total / count}
    if is_language_model:
        found["perplexity"] = math.exp(min(found["loss"], 700))
    if classified:
        found["accuracy"] = right / classified
    return found


def budget_metrics(
    budgets: Sequence[Any], evaluate: Callable[[Any], Mapping[str, float]]
) -> pd.DataFrame:
    """Metrics at each budget, one row each.

    Args:
        budgets: of CCT.
        evaluate: budget -> metrics.

    Returns:
        `budget` and the metrics, a column each.
    """
    return pd.DataFrame([{"budget": budget_name(budget), **evaluate(budget)} for budget in budgets])


def expert_selection(
    model: nn.Module, evaluate: Callable[[], Mapping[str, float]], *, draws: int = 3
) -> pd.DataFrame:
    """Metrics with all experts and with one per layer (Peng et al. 2020, table 5).

    Args:
        model: with MAE attention; its selection is afterwards as it was.
        evaluate: measures the model as it is; a `Trainer`'s `evaluate`, for example.
        draws: how often experts are drawn at random.

    Returns:
        Rows "mixture", "argmax" (in each layer the expert with the largest gate) and "random", whose
        metrics are means over the draws; and their standard deviations, `<metric> std`.

    Raises:
        ValueError: the model has no MAE attention, or `draws` is less than 1.
    """
    if draws < 1:
        raise ValueError(f"draws must be at least 1 (got {draws}).")
    gated = gated_model_of(model)
    before = next((m.selection for m in gated.modules() if is_instance_by_name(m, MixtureOfHeads)), None)
    rows = []
    try:
        for selection in (None, "argmax", "random"):
            gated.set_expert_selection(selection)
            runs = [evaluate() for _ in range(draws if selection == "random" else 1)]
            row: dict[str, Any] = {"experts": selection or "mixture"}
            for name in runs[0]:
                values = [run[name] for run in runs]
                row[name] = statistics.fmean(values)
                if draws > 1:
                    row[f"{name} std"] = statistics.stdev(values) if len(values) > 1 else None
            rows.append(row)
    finally:
        gated.set_expert_selection(before)
    return pd.DataFrame(rows)


def _is_causal(model: nn.Module) -> bool:
    """Whether the model's loss compares each position with the next label."""
    return "LMHeadModel" in type(gated_model_of(model)).__name__


# what a report says of their tables
SECTIONS = (
    Section(
        "budget_metrics",
        "Quality at each budget",
        "The model's metrics on the data's labels, at each compute budget.",
        plot_budget_metrics,
        whole,
    ),
    Section(
        "expert_selection",
        "One expert per layer",
        "Metrics with MAE's mixture of all experts; with the one that has the largest gate in each "
        "layer; with one at random (Peng et al. 2020, table 5). The more the gates have specialised "
        "the experts, the less “argmax” loses, and the more “random” does.",
        plot_selection,
        whole,
    ),
)
