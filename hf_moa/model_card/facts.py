"""The facts a card is made of: data, training, results; and which names are the Hub's."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from hf_moa.environment import version_of

# What `Trainer` logs beside the metrics of an evaluation.
_SPEED_SUFFIXES = (
    "_runtime",
    "_samples",
    "_samples_per_second",
    "_steps_per_second",
    "_model_preparation_time",
    "_jit_compilation_time",
)
_NO_METRICS = ("epoch", "step", "total_flos", "trainable_parameters", "num_input_tokens_seen")
# What the Accelerate scripts write beside them: where the run ended.
_NO_METRICS += ("seed", "tokens", "batches_in_epoch")
# Sizes of what was evaluated on.
SIZES = ("tokens", "words", "lines")
# What follows a name of MNLI's second set, and of a budget of CCT.
_OF_A_PART = re.compile(r"_mm$|_at_[\d._]+$")
_TEST_PREFIXES = ("test", "predict")
_PREFIXES = ("eval", *_TEST_PREFIXES)
# The Hub's names of metrics, where they differ.
_METRIC_TYPES = {"pearson": "pearsonr"}
_ACRONYMS = {"bleu": "BLEU"}


def at_budget(name: str, budget: float | Sequence[float]) -> str:
    """What the Accelerate scripts call a metric that was measured at a budget: `bleu_at_0.5`,
    `bleu_at_1_0.5`."""
    values = budget if isinstance(budget, (list, tuple)) else (budget,)
    return f"{name}_at_" + "_".join(f"{value:g}" for value in values)


@dataclass(frozen=True, kw_only=True)
class DataUsed:
    """A data set and what it was used for.

    Attributes:
        use: "training" or "evaluation".
        name: in words.
        dataset: its id on the Hub.
        config, split, revision: which part of it, as `datasets.load_dataset` names them.
        examples: how many there were.
    """

    use: str
    name: str | None = None
    dataset: str | None = None
    config: str | None = None
    split: str | None = None
    revision: str | None = None
    examples: int | None = None


@dataclass(frozen=True, kw_only=True)
class TrainingFacts:
    """How a model was trained.

    Attributes:
        data: the data sets.
        hyperparameters: by name.
        versions: package -> version that it was trained with.
        history: one row per evaluation during training: `step`, `epoch`, `training loss`, metrics.
    """

    data: tuple[DataUsed, ...] = ()
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    history: tuple[Mapping[str, Any], ...] = ()


def package_versions(*, is_adapter: bool = False) -> dict[str, str]:
    """Package -> installed version, of those that a training run depends on."""
    packages = {
        "hf_moa": "hf-moa",
        "PEFT": "peft" if is_adapter else None,
        "Transformers": "transformers",
        "PyTorch": "torch",
        "Datasets": "datasets",
        "Tokenizers": "tokenizers",
    }
    found = {name: version_of(package) for name, package in packages.items() if package}
    return {name: version for name, version in found.items() if version is not None}


def is_hub_id(name: str | None) -> bool:
    """Whether `name` can be the id of a repository on the Hub. (So can a relative path.)"""
    if not name:
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def hub_name(name: str | None) -> str | None:
    """The name, where it can be an id on the Hub and is no path on this machine; else None."""
    if name == "None" or not is_hub_id(name):  # the first is transformers' for weights from memory
        return None
    return None if Path(name).exists() else name


def as_number(value: Any) -> float | int | None:
    """A number as Python's own (of NumPy, of a tensor with one value); None for what is no number."""
    if hasattr(value, "item"):
        try:
            value = value.item()
        except (ValueError, RuntimeError):  # it has several
            return None
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if is_number else None


def is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def named_metrics(entry: Mapping[str, Any]) -> list[tuple[str, str, float | int]]:
    """The metrics in an entry of `Trainer`'s log or in one of its `*_results.json` files.

    Args:
        entry: such as `{"eval_accuracy": 0.9, "eval_runtime": 1.2, "epoch": 1.0}`.

    Returns:
        `(prefix, name, value)` of each: `("eval", "accuracy", 0.9)`. The prefix is "" where a name has
        none. What concerns training or speed, and what is no number, is left out.
    """
    suffix = _SPEED_SUFFIXES[0]
    found = {key.removesuffix(suffix) for key in entry if key.endswith(suffix)}
    prefixes = sorted({*found, *_PREFIXES}, key=len, reverse=True)
    metrics = []
    for key, value in entry.items():
        value = as_number(value)
        if value is None or key in _NO_METRICS or key.startswith("train_"):
            continue
        bare = _OF_A_PART.sub("", key)
        prefix = next((p for p in prefixes if key.startswith(f"{p}_")), "")
        if bare.endswith(_SPEED_SUFFIXES) or bare.removeprefix(f"{prefix}_") in SIZES:
            continue
        metrics.append((prefix, key.removeprefix(f"{prefix}_" if prefix else ""), value))
    return metrics


def in_words(metrics: Iterable[tuple[str, str, float | int]]) -> dict[str, float | int]:
    """Metrics, as `named_metrics` returns them, by the heads of a table's columns: "eval accuracy"."""
    return {f"{title_of(prefix)} {title_of(name)}".strip(): value for prefix, name, value in metrics}


def title_of(name: str) -> str:
    """A metric's name as the head of a column: "exact_match" -> "exact match", "bleu" -> "BLEU"."""
    return " ".join(_ACRONYMS.get(word, word) for word in name.split("_"))


def eval_results(
    metrics: Iterable[tuple[str, str, float | int]], *, task: str | None, data: DataUsed | None
) -> list[EvalResult]:
    """Metrics as the Hub has them.

    Args:
        metrics: as `named_metrics` returns them.
        task: such as "text-classification".
        data: what they were measured on, but for the split of those with a prefix of a test's. Where it
            names no data set, the results stand in the card's table and not in its metadata, which the
            Hub would refuse.
    """
    data = data or DataUsed(use="evaluation")
    results = []
    for prefix, name, value in metrics:
        shown = title_of(name)
        part = prefix.removeprefix("eval").strip("_")
        results.append(
            EvalResult(
                task_type=task,
                dataset_type=data.dataset,
                dataset_name=data.name or data.dataset,
                dataset_config=data.config,
                dataset_split="test" if data.split and prefix in _TEST_PREFIXES else data.split,
                dataset_revision=data.revision,
                metric_type=_METRIC_TYPES.get(name, name),
                metric_name=shown[0].upper() + shown[1:] + (f" ({part})" if part else ""),
                metric_value=value,
            )
        )
    return results
