"""Results of a run, from its logs and its files: metrics by name, their history, budgets.

named_metrics({"eval_accuracy": 0.9, "eval_runtime": 1.2})  # [("eval", "accuracy", 0.9)]
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from .json_files import read_json, read_object
from .markdown import cell, union_table
from .modeling.config.gating import GatingConfig

Metric = tuple[str, str, float | int]
_METRIC_FILES = ("all_results.json", "eval_results.json")
# What follows a name of MNLI's second set, and of a budget of CCT.
_OF_A_PART = re.compile(r"_mm$|_at_[\d._]+$")
# What logs and files of results hold beside metrics: where a run is, and how fast.
_NO_METRIC = re.compile(
    r"train_|(epoch|step|total_flos|trainable_parameters|num_input_tokens_seen|seed|tokens"
    r"|batches_in_epoch)$|.*_(runtime|samples|(samples|steps)_per_second|model_preparation_time"
    r"|jit_compilation_time)$"
)
# Sizes of what was evaluated on.
SIZES = ("tokens", "words", "lines")
# What names of metrics start with that were measured on test data.
TEST_PREFIXES = ("test", "predict")
_ACRONYMS = {"bleu": "BLEU"}


def as_number(value: Any) -> float | int | None:
    """A number as Python's own (of NumPy, of a tensor with one value); None for what is no number."""
    with suppress(AttributeError, ValueError, RuntimeError):  # it is no tensor, or has several values
        value = value.item()
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def at_budget(name: str, budget: float | Sequence[float]) -> str:
    """What the Accelerate scripts call a metric that was measured at a budget: `bleu_at_0.5`,
    `bleu_at_1_0.5`."""
    values = budget if isinstance(budget, (list, tuple)) else (budget,)
    return f"{name}_at_" + "_".join(f"{value:g}" for value in values)


def named_metrics(entry: Mapping[str, Any]) -> list[Metric]:
    """The metrics in an entry of `Trainer`'s log or in one of its `*_results.json` files.

    Args:
        entry: such as `{"eval_accuracy": 0.9, "eval_runtime": 1.2, "epoch": 1.0}`.

    Returns:
        `(prefix, name, value)` of each: `("eval", "accuracy", 0.9)`. The prefix is "" where a name has
        none. What concerns training or speed, and what is no number, is left out.
    """
    prefixes = {key.removesuffix("_runtime") for key in entry if key.endswith("_runtime")}
    prefixes |= {"eval", *TEST_PREFIXES}
    metrics = []
    for key, value in entry.items():
        found = (prefix for prefix in prefixes if key.startswith(f"{prefix}_"))
        prefix = max(found, key=len, default="")
        name, number = key[len(prefix) :].removeprefix("_"), as_number(value)
        is_size = _OF_A_PART.sub("", name) in SIZES
        if number is not None and not is_size and not _NO_METRIC.match(_OF_A_PART.sub("", key)):
            metrics.append((prefix, name, number))
    return metrics


def in_words(metrics: Iterable[Metric]) -> dict[str, float | int]:
    """Metrics, as `named_metrics` returns them, by the heads of a table's columns: "eval accuracy"."""
    return {f"{title_of(prefix)} {title_of(name)}".strip(): value for prefix, name, value in metrics}


def title_of(name: str) -> str:
    """A metric's name as the head of a column: "exact_match" -> "exact match", "bleu" -> "BLEU"."""
    return " ".join(_ACRONYMS.get(word, word) for word in name.split("_"))


def history_of(log: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
    """A row per evaluation during training, of `state.log_history`: step, epoch, losses, metrics."""
    rows: dict[int | None, dict[str, Any]] = {}
    loss = None
    for entry in log[: _end_of_training(log)]:
        loss = entry.get("loss", loss)
        metrics = _evaluation(entry)
        if metrics:
            row = {"step": entry.get("step"), "epoch": entry.get("epoch"), "training loss": loss}
            rows.setdefault(entry.get("step"), row).update(in_words(metrics))
    return tuple(rows.values())


def final_metrics(
    log: Sequence[Mapping[str, Any]], *, step: int | None, loaded_step: int | None = None
) -> list[Metric]:
    """The metrics of the very weights that a run left, as `named_metrics` has them.

    Args:
        log: `state.log_history`.
        step: the last step: evaluations at it count, and most those after the end of training. None
            where it is not known.
        loaded_step: the step whose weights were loaded at the end of training instead.
    """
    end = _end_of_training(log)
    entries = [entry for entry in log[end:] if entry.get("step") == step and _evaluation(entry)]
    if not entries:
        measured = step if loaded_step is None else loaded_step
        entries = [entry for entry in log[:end] if entry.get("step") == measured]
    merged = {metric[:2]: metric[2] for entry in entries for metric in _evaluation(entry)}
    return [(*names, value) for names, value in merged.items()]


def _end_of_training(log: Sequence[Mapping[str, Any]]) -> int:
    """The index of the entry at the last end of training; that behind all where training did not end."""
    return max((i for i, entry in enumerate(log) if "train_runtime" in entry), default=len(log))


def _evaluation(entry: Mapping[str, Any]) -> list[Metric]:
    """The metrics of a log entry, if it is an evaluation's."""
    is_evaluation = any(key.endswith("_runtime") and key != "train_runtime" for key in entry)
    return [metric for metric in named_metrics(entry) if metric[0]] if is_evaluation else []


def metrics_in(
    folder: Path, given: str | Path | Mapping[str, float] | None, config: GatingConfig
) -> list[Metric]:
    """The metrics of a checkpoint, as `named_metrics` has them.

    Args:
        folder: the checkpoint's, whose all_results.json or eval_results.json is read.
        given: those to take instead, by name, or a JSON file of them.
        config: of the model: of one with budgets, the metrics at the largest.

    Raises:
        ValueError: a file is no JSON object; `given` holds no metrics, or what is no number.
    """
    if given is not None:
        entries = given if isinstance(given, Mapping) else read_object(Path(given))
        wrong = [name for name, value in entries.items() if as_number(value) is None]
        found = named_metrics(entries)
        if wrong or not found:
            raise ValueError(
                f"{_source(given, 'metrics')} must hold metrics by name, each a number, such as "
                f'{{"accuracy": 0.9}} (got {"no number for " + ", ".join(wrong) if wrong else "none"}).'
            )
        return found
    files = (read_object(folder / name) for name in _METRIC_FILES if (folder / name).is_file())
    named = (named_metrics(_at_largest_budget(entry, config)) for entry in files)
    return next(filter(None, named), [])


def _at_largest_budget(entries: Mapping[str, Any], config: GatingConfig) -> dict[str, Any]:
    """What an Accelerate script wrote, of a CCT model at its largest budget under the plain names."""
    found = dict(entries)
    ends = [at_budget("", budget) for budget in config.listed_budgets]
    for name in [key.removesuffix(ends[0]) for key in entries if ends and key.endswith(ends[0])]:
        if all(name + end in entries for end in ends):
            largest, *_ = [found.pop(name + end) for end in ends]
            found |= {} if name == "compute_fraction" else {name: largest}
    return found


def logged_metrics(state: Mapping[str, Any]) -> list[Metric]:
    """Metrics of the weights that a trainer's state, trainer_state.json, belongs to."""
    log, step, best = (state.get(name) for name in ("log_history", "global_step", "best_global_step"))
    if best not in (None, step) and any("train_runtime" in entry for entry in log or []):
        return []  # the weights may be the best ones or the last; the state does not say which
    return final_metrics(log or [], step=step)


def budget_rows_in(
    folder: Path, given: str | Path | Sequence[Mapping[str, Any]] | None
) -> Sequence[Mapping[str, Any]]:
    """The rows that `evaluate_budgets` returned.

    Args:
        folder: a checkpoint's, whose budget_results*.json is read, if there is one.
        given: those to take instead, or a JSON file of them.

    Raises:
        ValueError: a file, or `given`, holds something else.
    """
    if given is None:
        files = sorted(folder.glob("budget_results*.json"))
        if len(files) != 1:  # of several data sets
            return []
        given = files[0]
    is_file = isinstance(given, (str, Path))
    rows: Any = read_json(Path(given)) if isinstance(given, (str, Path)) else list(given)
    is_list = isinstance(rows, list) and all(isinstance(row, dict) for row in rows)
    if not is_list or (is_file and not rows):
        raise ValueError(
            f"{_source(given, 'budgets')} must hold a list of the rows that `evaluate_budgets` returned "
            f"(got {json.dumps(rows)[:60]})."
        )
    return rows


def _source(given: Any, name: str) -> Any:
    """What to call it in an error: a file by its path."""
    return given if isinstance(given, (str, Path)) else f"`{name}`"


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
