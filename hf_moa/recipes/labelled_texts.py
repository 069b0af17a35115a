"""One's own texts with labels, of CSV files or JSON lines, as a task like GLUE's."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
from transformers import PreTrainedConfig

from hf_moa.training import GlueTask

from .command_line import optional
from .files import read_rows

_LABEL = "label"


@dataclass
class LabelledFileArguments:
    """Files of texts with labels, instead of a GLUE task."""

    train_file: str | None = optional(
        "Own training data instead of a GLUE task, .csv or .json (an object a line), plain or .gz: a "
        "column `label`, and one or two of text. Labels are names or numbers; where some have decimals, "
        "it is a regression."
    )
    validation_file: str | None = optional("The same to evaluate on.")
    test_file: str | None = optional("The same to predict, with or without labels.")

    @property
    def own_files(self) -> dict[str, str]:
        """Split -> file."""
        files = {
            "train": self.train_file,
            "validation": self.validation_file,
            "test": self.test_file,
        }
        return {split: path for split, path in files.items() if path is not None}


def load_labelled_files(files: dict[str, str], config: PreTrainedConfig) -> tuple[DatasetDict, GlueTask]:
    """The splits, with the columns of text, `label` and `idx` (the row's place), and what they are.

    The classes are those of the training file (without one, of the validation file), in order. Where a
    classifier's checkpoint knows them all, they are the checkpoint's, by name or by number.

    Args:
        files: split -> path.
        config: of the checkpoint.

    Raises:
        ValueError: a file that does not hold what `LabelledFileArguments` says, or labels that the first
            one lacks.
    """
    rows = {split: read_rows(path, f"{split}_file") for split, path in files.items()}
    first = next(iter(rows))
    columns = _text_columns(rows[first], files[first])
    labels = {split: _labels(rows[split], files[split], is_needed=split != "test") for split in rows}
    names = _class_names(labels[first], files[first], config)
    task = GlueTask(
        folder="",
        text_columns={name: name for name in columns},
        label_column=_LABEL,
        label_names=None if names is None else tuple(names),
    )
    label = Value("float32") if names is None else ClassLabel(names=names)
    texts = {name: Value("string") for name in columns}
    features = Features({**texts, _LABEL: label, "idx": Value("int32")})
    splits = DatasetDict()
    for split, path in files.items():
        data: dict[str, list[Any]] = {
            name: [_text(row, name, i, path) for i, row in enumerate(rows[split])] for name in columns
        }
        data[_LABEL] = [_id(value, names, i, path) for i, value in enumerate(labels[split])]
        data["idx"] = list(range(len(rows[split])))
        splits[split] = Dataset.from_dict(data, features=features)
    return splits, task


def _text_columns(rows: list[dict], path: str) -> list[str]:
    """The columns that hold text: `sentence1` and `sentence2`, or else the one or two there are."""
    columns = [name for name in rows[0] if name is not None and name != _LABEL]
    if {"sentence1", "sentence2"} <= {*columns}:
        return ["sentence1", "sentence2"]
    texts = [name for name in columns if any(_is_text(row.get(name)) for row in rows)]
    if not 1 <= len(texts) <= 2:
        raise ValueError(
            f"{path} must have one or two columns of text beside `label` (got "
            f"{', '.join(texts) or 'none'} among {', '.join(map(str, rows[0]))}). Leave out others, "
            "or name two of them sentence1 and sentence2."
        )
    return texts


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != "" and _number(value) is None


def _number(value: Any) -> float | None:
    """The number that a value is or is written as; None where it is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _labels(rows: list[dict], path: str, *, is_needed: bool) -> list[Any]:
    """A label for each row, None where test data have none."""
    labels = [row.get(_LABEL) for row in rows]
    for i, label in enumerate(labels):
        if isinstance(label, (list, dict)) or (is_needed and label in (None, "")):
            raise ValueError(
                f"{path} must have a name or a number in the column `{_LABEL}` (row {i} has {label!r})."
            )
    return [None if label == "" else label for label in labels]


def _class_names(labels: list[Any], path: str, config: PreTrainedConfig) -> list[str] | None:
    """The classes in the order of their ids; None for a regression."""
    numbers = [_number(label) for label in labels]
    are_numbers = None not in numbers
    if are_numbers and any(number != int(number) for number in numbers):  # type: ignore[arg-type]  # none is None
        return None
    names = {_name(label) for label in labels}
    if any(name.endswith("ForSequenceClassification") for name in config.architectures or []):
        id2label = getattr(config, "id2label", {})
        known = [str(id2label[i]) for i in sorted(id2label)]
        if names <= {*known} or (are_numbers and names <= {str(i) for i in range(len(known))}):
            return known
    if len(names) < 2:
        raise ValueError(f"{path} must have labels of two classes at least (got {', '.join(names)}).")
    return sorted(names, key=(lambda name: (int(name), "")) if are_numbers else None)


def _name(label: Any) -> str:
    number = _number(label)
    return str(label) if number is None or number != int(number) else str(int(number))


def _text(row: dict, name: str, place: int, path: str) -> str:
    if not isinstance(row.get(name), str):
        raise ValueError(f"{path} must have a text in the column {name!r} (row {place} is {row!r}).")
    return row[name]


def _id(label: Any, names: Iterable[str] | None, place: int, path: str) -> int | float:
    """Of a label the number of its class, or the number that it is; -1 for none."""
    if label is None:
        return -1
    if names is None:
        if (number := _number(label)) is None:
            raise ValueError(f"{path} must have numbers as labels (row {place} has {label!r}).")
        return number
    names, name = list(names), _name(label)
    if name in names:
        return names.index(name)
    if _number(label) is not None and name in map(str, range(len(names))):
        return int(name)
    raise ValueError(
        f"{path} must have labels that are known, {', '.join(names)} (row {place} has {label!r})."
    )
