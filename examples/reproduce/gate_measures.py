"""What the gates of a trained model do, in the numbers that an experiment keeps."""

from __future__ import annotations

import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from summaries import Column, at_budget

from hf_moa.analysis import analyze
from hf_moa.text_batches import TextBatches, read_text

# of what `balance` returns
LOAD_CV = Column("CV of the load", "load_cv", "{:.2f}")
LOAD_MAX = Column("largest load / mean", "load_max", "{:.2f}")
UNUSED = Column("experts with less than a tenth of the mean", "unused", "{:.0%}")


def tables_of(
    model: Any, folder: str | Path, text: str, *, target: str | None = None, limit: int | None = None
) -> dict[str, Any]:
    """The analysis' tables of a model on a text, a row each line.

    Args:
        folder: of the model's tokenizer.
        limit: lines to read.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    data = read_text(text, target_file=target, limit=limit)
    data = data.filter(lambda row: row["text"].strip() != "")
    batches = TextBatches(data, tokenizer, model, with_labels=False, batch_size=32)
    return analyze(model, batches, tokenizer=tokenizer, progress=False).tables


def balance(tables: dict[str, Any]) -> dict[str, float]:
    """How evenly the tokens are spread over the experts, means over the layers.

    Returns:
        `load_cv`: the coefficient of variation of the experts' loads; `load_max`: the largest load over
        the mean; `unused`: the share of experts that get less than a tenth of the mean.
    """
    loads = defaultdict(list)
    for row in tables["expert_load"].to_dict("records"):
        loads[row["part"], row["layer"]].append(row["load"])
    mean = {place: statistics.fmean(values) for place, values in loads.items()}
    found = {
        "load_cv": [statistics.pstdev(values) / mean[place] for place, values in loads.items()],
        "load_max": [max(values) / mean[place] for place, values in loads.items()],
        "unused": [
            sum(value < 0.1 * mean[place] for value in values) / len(values)
            for place, values in loads.items()
        ],
    }
    return {name: statistics.fmean(values) for name, values in found.items()}


def mae_gates(tables: dict[str, Any]) -> dict[str, float]:
    """Means over the layers: `entropy` of the gates in nats, and `largest_share`, the share of the
    inputs that are attributed to the expert with the most of them."""
    largest: dict[tuple[str, int], float] = {}
    for row in tables["mae_experts"].to_dict("records"):
        place = row["part"], row["layer"]
        largest[place] = max(largest.get(place, 0.0), row["share"])
    return {
        "entropy": statistics.fmean(tables["mae_entropy"]["entropy"]),
        "largest_share": statistics.fmean(largest.values()),
    }


def layer_flops(model: Any, *lengths: int, budget: float | None = None, compute: float = 1.0) -> float:
    """Floating-point operations of the layers for one text, control networks included.

    Args:
        lengths: tokens of the text (of an encoder-decoder model, of both).
        budget: any of CCT's below 1; None without CCT.
        compute: share of what the gates can skip that is computed, as the model measured it.
    """
    from hf_moa.flops import count_flops

    def active(budget: float | None) -> float:
        flops = count_flops(model, *lengths, budget=budget)
        return sum(part.active for part in flops.parts if part.part != "head")

    if budget is None:
        return active(None)
    full = active(1.0)
    skippable = (full - active(budget)) / (1 - budget)
    return full - skippable * (1 - compute)


def computed_at(model: Any, *lengths: int, budget: float, compute: float) -> dict[str, float]:
    """What a CCT model computed at a budget, under the names that an experiment keeps: `compute`, the
    share of what the gates can skip, and `flops`, all of `layer_flops`.

    Args:
        lengths, compute: of `layer_flops`.
    """
    smallest = min(model.config.stack_budgets)
    flops = layer_flops(model, *lengths, budget=smallest, compute=compute)
    return {at_budget("compute", budget): compute, at_budget("flops", budget): flops}
