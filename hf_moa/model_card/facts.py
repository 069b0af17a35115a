"""The facts a card is made of: data, training, results; and which names are the Hub's."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from hf_moa.environment import version_of

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
_TEST_PREFIXES = ("test", "predict")
# The Hub's names of metrics, where they differ.
_METRIC_TYPES = {"pearson": "pearsonr"}
_ACRONYMS = {"bleu": "BLEU"}


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
    packages = {"hf_moa": "hf-moa", **({"PEFT": "peft"} if is_adapter else {})}
    packages |= {"Transformers": "transformers", "PyTorch": "torch"}
    packages |= {"Datasets": "datasets", "Tokenizers": "tokenizers"}
    found = {name: version_of(package) for name, package in packages.items()}
    return {name: version for name, version in found.items() if version is not None}


def is_hub_id(name: str | None) -> bool:
    """Whether `name` can be the id of a repository on the Hub. (So can a relative path.)"""
    try:
        validate_repo_id(name or "")
    except HFValidationError:
        return False
    return True


def hub_name(name: str | None) -> str | None:
    """The name, where it can be an id on the Hub and is no path on this machine; else None."""
    if name == "None" or not is_hub_id(name):  # the first is transformers' for weights from memory
        return None
    return None if Path(name).exists() else name


def listed(value: Any) -> list[Any]:
    """A list of what may be one value, several or none."""
    if not value:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def named_data(name: str) -> DataUsed:
    """A data set of the training of which no more than a name is known."""
    return DataUsed(use="training", dataset=name if is_hub_id(name) else None, name=name)


def read_json(path: Path) -> Any:
    """What a JSON file holds.

    Raises:
        ValueError: there is no such file, or it does not hold JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"There is no file {path}; give the path of a JSON file.") from error
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} must hold JSON ({error}).") from error


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; a ValueError where it holds something else."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object (got a {type(value).__name__}).")
    return value


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


def named_metrics(entry: Mapping[str, Any]) -> list[tuple[str, str, float | int]]:
    """The metrics in an entry of `Trainer`'s log or in one of its `*_results.json` files.

    Args:
        entry: such as `{"eval_accuracy": 0.9, "eval_runtime": 1.2, "epoch": 1.0}`.

    Returns:
        `(prefix, name, value)` of each: `("eval", "accuracy", 0.9)`. The prefix is "" where a name has
        none. What concerns training or speed, and what is no number, is left out.
    """
    prefixes = {key.removesuffix("_runtime") for key in entry if key.endswith("_runtime")}
    prefixes |= {"eval", *_TEST_PREFIXES}
    metrics = []
    for key, value in entry.items():
        found = (prefix for prefix in prefixes if key.startswith(f"{prefix}_"))
        prefix = max(found, key=len, default="")
        name, number = key[len(prefix) :].removeprefix("_"), as_number(value)
        is_size = _OF_A_PART.sub("", name) in SIZES
        if number is not None and not is_size and not _NO_METRIC.match(_OF_A_PART.sub("", key)):
            metrics.append((prefix, name, number))
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
        task: such as "text-classification". None: that of the card.
        data: what they were measured on, but for the split of those with a prefix of a test's. Where it
            names no data set, the results stand in the card's table and not in its metadata, which the
            Hub would refuse.
    """
    data = data or DataUsed(use="evaluation")
    results = []
    for prefix, name, value in metrics:
        title, part = title_of(name), prefix.removeprefix("eval").strip("_")
        result = EvalResult(
            task_type=task,
            dataset_type=data.dataset,
            dataset_name=data.name or data.dataset,
            dataset_config=data.config,
            dataset_split="test" if data.split and prefix in _TEST_PREFIXES else data.split,
            dataset_revision=data.revision,
            metric_type=_METRIC_TYPES.get(name, name),
            metric_name=title[0].upper() + title[1:] + (f" ({part})" if part else ""),
            metric_value=value,
        )
        results.append(result)
    return results
