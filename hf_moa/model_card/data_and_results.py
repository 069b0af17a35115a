"""Data sets and results as a card has them: in tables, and in its metadata."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from huggingface_hub import EvalResult

from hf_moa.hub_names import is_hub_id
from hf_moa.markdown import read_table, table
from hf_moa.run_facts import DataUsed
from hf_moa.run_results import TEST_PREFIXES, Metric, title_of

# The Hub's names of metrics, where they differ.
_METRIC_TYPES = {"pearson": "pearsonr"}
# Fields of `DataUsed` -> the columns that show them.
_DATA_COLUMNS = {"use": "use", "name": "data set", "dataset": "on the Hub"}
_DATA_COLUMNS |= {"config": "configuration", "split": "split", "examples": "examples"}
_NOT_RECORDED = "not recorded"


def listed(value: Any) -> list[Any]:
    """A list of what may be one value, several or none."""
    if not value:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def named_data(name: str) -> DataUsed:
    """A data set of the training of which no more than a name is known."""
    return DataUsed(use="training", dataset=name if is_hub_id(name) else None, name=name)


def eval_results(
    metrics: Iterable[Metric], *, task: str | None, data: DataUsed | None
) -> list[EvalResult]:
    """Metrics as the Hub has them.

    Args:
        metrics: as `named_metrics` returns them.
        task: such as "text-classification". None: that of the card.
        data: what they were measured on, except the split of those with a prefix of a test's. The Hub
            refuses results on no data set, which therefore stand only in the card's table.
    """
    data = data or DataUsed(use="evaluation")
    # what is not known is None: such results stand only in the table
    results = []
    for prefix, name, value in metrics:
        title, part = title_of(name), prefix.removeprefix("eval").strip("_")
        result = EvalResult(
            task_type=task,  # type: ignore[arg-type]
            dataset_type=data.dataset,  # type: ignore[arg-type]
            dataset_name=data.name or data.dataset,  # type: ignore[arg-type]
            dataset_config=data.config,
            dataset_split="test" if data.split and prefix in TEST_PREFIXES else data.split,
            dataset_revision=data.revision,
            metric_type=_METRIC_TYPES.get(name, name),
            metric_name=title[0].upper() + title[1:] + (f" ({part})" if part else ""),
            metric_value=value,
        )
        results.append(result)
    return results


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
        facts: dict[str, Any] = {f: row.get(column) or None for f, column in _DATA_COLUMNS.items()}
        if not facts["use"] or not facts["name"]:
            return []
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
