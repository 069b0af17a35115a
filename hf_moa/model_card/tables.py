"""The tables of a card."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from huggingface_hub import EvalResult

from hf_moa.markdown import cell, read_table, table

from .facts import SIZES, DataUsed, title_of

_NOT_RECORDED = "not recorded"


def data_table(data: Sequence[DataUsed]) -> str:
    """The data sets, without the columns of which nothing is known."""
    rows = [
        {
            "use": used.use,
            "data set": used.name or used.dataset or _NOT_RECORDED,
            "on the Hub": used.dataset,
            "configuration": used.config,
            "split": used.split,
            "examples": None if used.examples is None else f"{used.examples:,}",
        }
        for used in data
    ]
    known = [key for key in rows[0] if any(row[key] is not None for row in rows)]
    return table(known, ([row[key] for key in known] for row in rows))


def data_rows(text: str) -> list[DataUsed]:
    """The data sets in a section that `data_table` wrote; those of other tables are none."""
    rows = []
    for row in read_table(text):
        name, examples = row.get("data set"), row.get("examples", "").replace(",", "")
        if not name or "use" not in row:
            return []
        rows.append(
            DataUsed(
                use=row["use"],
                name=None if name == _NOT_RECORDED else name,
                dataset=row.get("on the Hub") or None,
                config=row.get("configuration") or None,
                split=row.get("split") or None,
                examples=int(examples) if examples.isdigit() else None,
            )
        )
    return rows


def result_table(results: Sequence[EvalResult]) -> str:
    """The metrics, each with what it was measured on."""
    rows = []
    for result in results:
        parts = [part for part in (result.dataset_config, result.dataset_split) if part]
        name = result.dataset_name or "evaluation data"
        rows.append(
            [
                name + (f" ({', '.join(parts)})" if parts else ""),
                result.metric_name or result.metric_type,
                result.metric_value,
            ]
        )
    return table(["data", "metric", "value"], rows)


def budget_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Metrics, compute fraction, seconds and speed-up by budget.

    Args:
        rows: as `evaluate_budgets` returns them, or as they come back from JSON. The speed-up is that
            over the largest budget; both its columns are left out where no time was taken.

    Raises:
        ValueError: a row has no budget, or one that is no number or pair of numbers.
    """
    sizes = [_size(row) for row in rows]
    slowest = rows[sizes.index(max(sizes))].get("seconds")
    names = dict.fromkeys(key for row in rows for key in row)
    times = ["seconds", "speed-up"] if "seconds" in names else []
    sizes_of_data = [name for name in names if name.removeprefix("eval_") in SIZES]
    measured = ("budget", "compute_fraction", "seconds", *sizes_of_data)
    metrics = [name for name in names if name not in measured]
    shown = []
    for row in rows:
        seconds = row.get("seconds")
        faster = f"{slowest / seconds:.2f}x" if slowest and seconds else None
        budget = row["budget"]
        budget = ", ".join(map(cell, budget)) if isinstance(budget, (list, tuple)) else budget
        values = [budget, row.get("compute_fraction"), *(row.get(name) for name in metrics)]
        shown.append([*values, *([seconds, faster] if times else [])])
    titles = [title_of(name.removeprefix("eval_")) for name in metrics]
    return table(["budget", "compute fraction", *titles, *times], shown)


def _size(row: Mapping[str, Any]) -> float:
    budget = row.get("budget")
    numbers = budget if isinstance(budget, (list, tuple)) else [budget]
    if not numbers or not all(isinstance(b, (int, float)) and not isinstance(b, bool) for b in numbers):
        raise ValueError(
            "Every row of budgets must have a `budget`, a number or a pair of numbers, as "
            f"`evaluate_budgets` writes them (got {dict(row)!r})."
        )
    return sum(numbers)
