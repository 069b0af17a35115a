"""The tables of a card."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from huggingface_hub import EvalResult

from hf_moa.markdown import cell, read_table, table, union_table

from .facts import SIZES, DataUsed, title_of

# Fields of `DataUsed` -> the columns that show them.
_DATA_COLUMNS = {
    "use": "use",
    "name": "data set",
    "dataset": "on the Hub",
    "config": "configuration",
    "split": "split",
    "examples": "examples",
}
_NOT_RECORDED = "not recorded"
# With more experts than this, their shares do not fit on a line.
_MOST_SHARES = 16


def data_table(data: Sequence[DataUsed]) -> str:
    """The data sets, without the columns of which nothing is known."""
    rows = []
    for used in data:
        row = {column: getattr(used, field) for field, column in _DATA_COLUMNS.items()}
        row["data set"] = used.name or used.dataset or _NOT_RECORDED
        row["examples"] = None if used.examples is None else f"{used.examples:,}"
        rows.append(row)
    known = [column for column in rows[0] if any(row[column] is not None for row in rows)]
    return table(known, ([row[column] for column in known] for row in rows))


def data_in(text: str) -> list[DataUsed]:
    """The data sets in a section that `data_table` wrote; those of other tables are none."""
    data = []
    for row in read_table(text):
        if "use" not in row or not row.get("data set"):
            return []
        facts: dict[str, Any] = {f: row.get(column) or None for f, column in _DATA_COLUMNS.items()}
        examples = row.get("examples", "").replace(",", "")
        facts["name"] = None if facts["name"] == _NOT_RECORDED else facts["name"]
        facts["examples"] = int(examples) if examples.isdigit() else None
        data.append(DataUsed(**facts))
    return data


def result_table(results: Sequence[EvalResult]) -> str:
    """The metrics, each with what it was measured on."""
    rows = []
    for result in results:
        parts = ", ".join(part for part in (result.dataset_config, result.dataset_split) if part)
        data = (result.dataset_name or "evaluation data") + (f" ({parts})" if parts else "")
        rows.append([data, result.metric_name or result.metric_type, result.metric_value])
    return table(["data", "metric", "value"], rows)


def budget_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Metrics, compute fraction, seconds and speed-up over the largest budget, by budget.

    Args:
        rows: as `evaluate_budgets` returns them, or as they come back from JSON.

    Raises:
        ValueError: a row has no budget, or one that is no number or pair of numbers.
    """
    slowest = max(rows, key=_size).get("seconds")
    names = dict.fromkeys(name for row in rows for name in row)
    hidden = ("budget", "compute_fraction", "seconds")
    metrics = [name for name in names if name not in hidden and name.removeprefix("eval_") not in SIZES]
    shown = []
    for row in rows:
        budget, seconds = row["budget"], row.get("seconds")
        values = {
            "budget": ", ".join(map(cell, budget)) if isinstance(budget, (list, tuple)) else budget,
            "compute fraction": row.get("compute_fraction"),
            **{title_of(name.removeprefix("eval_")): row.get(name) for name in metrics},
        }
        if "seconds" in names:
            faster = f"{slowest / seconds:.2f}x" if slowest and seconds else None
            values |= {"seconds": seconds, "speed-up": faster}
        shown.append(values)
    return union_table(shown)


def _size(row: Mapping[str, Any]) -> float:
    budget = row.get("budget")
    numbers = budget if isinstance(budget, (list, tuple)) else [budget]
    if not numbers or not all(isinstance(b, (int, float)) and not isinstance(b, bool) for b in numbers):
        raise ValueError(
            "Every row of budgets must have a `budget`, a number or a pair of numbers, as "
            f"`evaluate_budgets` writes them (got {dict(row)!r})."
        )
    return sum(numbers)


def expert_load_table(expert_load: Mapping[str, Sequence[Sequence[float]]]) -> str:
    """Shares of the experts by layer: least, most, entropy over that of an even load, and each.

    Args:
        expert_load: part of the layer -> `[layers][N]`.

    Raises:
        ValueError: a layer has no experts, or a share is no number in [0, 1].
    """
    rows = []
    most = max(len(shares) for layers in expert_load.values() for shares in layers)
    for part, layers in expert_load.items():
        for i, shares in enumerate(layers):
            if not shares or not all(0 <= share <= 1 + 1e-6 for share in shares):
                raise ValueError(
                    f"expert_load[{part!r}][{i}] must be the shares of a layer's experts, numbers in "
                    f"[0, 1] (got {shares!r})."
                )
            entropy = sum(share * math.log(1 / share) for share in shares if share > 0)
            relative = entropy / math.log(len(shares)) if len(shares) > 1 else 1.0
            numbers = {"least": min(shares), "most": max(shares), "entropy": relative}
            row = {"part": part.replace("_", " "), "layer": i}
            row |= {name: f"{number:.3f}" for name, number in numbers.items()}
            if most <= _MOST_SHARES:
                row["shares"] = " ".join(f"{share:.3f}" for share in shares)
            rows.append(row)
    return union_table(rows)
