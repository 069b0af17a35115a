"""GLUE tasks from their published TSV files, for use without the Hub.

datasets = load_glue_tsv("glue_data", "mrpc")  # reads glue_data/MRPC/{train,dev,test}.tsv
"""

import gzip
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_moa.extras import from_extra

with from_extra("train"):
    from datasets import ClassLabel, Dataset, DatasetDict, Features, Value

logger = logging.getLogger(__name__)

_SPLITS = {"train": "train", "validation": "dev", "test": "test"}
_ENTAILMENT = ("entailment", "not_entailment")


@dataclass(frozen=True)
class GlueTask:
    """Where a task's files are and what is in them.

    Args:
        folder: name of the folder of the published files.
        text_columns: name in the dataset (as in `nyu-mll/glue`) -> name in the file's header.
        label_column: name of the label in the file's header.
        label_names: the classes in the order of their ids; `None` for regression.
        labels_in_file: how the files write the classes, in the same order.
        splits: name of the split in the dataset -> name of the file, without `.tsv`.
    """

    folder: str
    text_columns: dict[str, str]
    label_column: str
    label_names: tuple[str, ...] | None
    labels_in_file: tuple[str, ...] = ("0", "1")
    splits: dict[str, str] = field(default_factory=lambda: dict(_SPLITS))

    @property
    def is_regression(self) -> bool:
        return self.label_names is None

    @property
    def num_labels(self) -> int:
        return 1 if self.label_names is None else len(self.label_names)

    @property
    def features(self) -> Features:
        names = self.label_names
        label = Value("float32") if names is None else ClassLabel(names=list(names))
        texts = {name: Value("string") for name in self.text_columns}
        return Features({**texts, "label": label, "idx": Value("int32")})


def _pair(first: str, second: str) -> dict[str, str]:
    return {first: first, second: second}


# name of a task, as transformers' scripts have it -> its files and columns
GLUE_TASKS = {
    "cola": GlueTask(
        folder="CoLA",
        text_columns={"sentence": "sentence"},
        label_column="label",
        label_names=("unacceptable", "acceptable"),
    ),
    "mnli": GlueTask(
        folder="MNLI",
        text_columns={"premise": "sentence1", "hypothesis": "sentence2"},
        label_column="gold_label",
        label_names=("entailment", "neutral", "contradiction"),
        labels_in_file=("entailment", "neutral", "contradiction"),
        splits={
            "train": "train",
            "validation_matched": "dev_matched",
            "validation_mismatched": "dev_mismatched",
            "test_matched": "test_matched",
            "test_mismatched": "test_mismatched",
        },
    ),
    "mrpc": GlueTask(
        folder="MRPC",
        text_columns={"sentence1": "#1 String", "sentence2": "#2 String"},
        label_column="Quality",
        label_names=("not_equivalent", "equivalent"),
    ),
    "qnli": GlueTask(
        folder="QNLI",
        text_columns=_pair("question", "sentence"),
        label_column="label",
        label_names=_ENTAILMENT,
        labels_in_file=_ENTAILMENT,
    ),
    "qqp": GlueTask(
        folder="QQP",
        text_columns=_pair("question1", "question2"),
        label_column="is_duplicate",
        label_names=("not_duplicate", "duplicate"),
    ),
    "rte": GlueTask(
        folder="RTE",
        text_columns=_pair("sentence1", "sentence2"),
        label_column="label",
        label_names=_ENTAILMENT,
        labels_in_file=_ENTAILMENT,
    ),
    "sst2": GlueTask(
        folder="SST-2",
        text_columns={"sentence": "sentence"},
        label_column="label",
        label_names=("negative", "positive"),
    ),
    "stsb": GlueTask(
        folder="STS-B",
        text_columns=_pair("sentence1", "sentence2"),
        label_column="score",
        label_names=None,
    ),
    "wnli": GlueTask(
        folder="WNLI",
        text_columns=_pair("sentence1", "sentence2"),
        label_column="label",
        label_names=("not_entailment", "entailment"),
    ),
}

# The published training and development files of CoLA have no header line.
_COLA_HEADER = ["source", "label", "star", "sentence"]


def load_glue_tsv(data_dir: str | Path, task_name: str, skip_malformed: bool = False) -> DatasetDict:
    """Reads one GLUE task from its published TSV files.

    The files are `data_dir/<folder>/<file>.tsv` or `.tsv.gz` (the plain file where both exist),
    with the benchmark's folder names (`CoLA`, `MNLI`, `MRPC`, `QNLI`, `QQP`, `RTE`, `SST-2`,
    `STS-B`, `WNLI`) and file names (`train`, `dev`, `test`; for MNLI `dev_matched`,
    `dev_mismatched`, `test_matched`, `test_mismatched`). They are UTF-8 with or without a byte
    order mark; fields are separated by tabs and quotes are ordinary characters
    (`csv.QUOTE_NONE`). Blank lines are passed over. Columns that are not needed are ignored.

    Args:
        data_dir: the folder that holds the tasks' folders.
        task_name: one of `GLUE_TASKS`.
        skip_malformed: leave out malformed rows, with a warning that counts them, instead of
            raising. The published QQP files have a few rows with missing columns.

    Returns:
        The splits whose files exist, with the columns, label names and split names of
        `nyu-mll/glue`: the texts, `label` and `idx` (the row's place in its file). Test files have
        no labels: `label` is -1 there.

    Raises:
        ValueError: unknown task; no file found; a file without examples or without the columns it
            needs; a malformed row (number of columns, unknown label), with file, line number and
            what was expected.
    """
    if task_name not in GLUE_TASKS:
        raise ValueError(f"`task_name` must be one of {', '.join(GLUE_TASKS)} (got {task_name!r}).")
    task = GLUE_TASKS[task_name]
    folder = Path(data_dir) / task.folder
    splits = DatasetDict()
    for split, stem in task.splits.items():
        path = next((p for p in _candidates(folder, stem) if p.is_file()), None)
        if path is not None:
            splits[split] = _read_split(path, task, split, skip_malformed)
    if not splits:
        expected = ", ".join(p.name for stem in task.splits.values() for p in _candidates("", stem))
        raise ValueError(
            f"`data_dir` must hold the folder {task.folder} with GLUE's files for {task_name} "
            f"(one or more of {expected}); found none in {folder}."
        )
    return splits


def _candidates(folder: str | Path, stem: str) -> list[Path]:
    return [Path(folder) / f"{stem}.tsv", Path(folder) / f"{stem}.tsv.gz"]


def _read_split(path: Path, task: GlueTask, split: str, skip_malformed: bool) -> Dataset:
    lines = _read_lines(path)
    if task.folder == "CoLA" and split != "test":
        header = _COLA_HEADER
    else:
        _, header = next(lines, (1, []))
    # Only test files may do without the labels.
    required = list(task.text_columns.values())
    has_labels = task.label_column in header
    if not split.startswith("test"):
        required.append(task.label_column)
    missing = [column for column in required if column not in header]
    if missing:
        raise ValueError(
            f"{path}, line 1: the header must have the columns {', '.join(map(repr, required))} "
            f"(got {header}, without {', '.join(map(repr, missing))})."
        )
    text_places = {name: header.index(column) for name, column in task.text_columns.items()}
    label_place = header.index(task.label_column) if has_labels else None

    columns: dict[str, list[Any]] = {name: [] for name in task.features}
    num_malformed = 0
    for idx, (number, row) in enumerate(lines):
        try:
            if len(row) != len(header):
                raise ValueError(f"expected {len(header)} columns {header}, got {len(row)}")
            label = -1 if label_place is None else _parse_label(row[label_place], task)
        except ValueError as error:
            if skip_malformed:
                num_malformed += 1
                continue
            raise ValueError(
                f"{path}, line {number}: {error}. Correct the line, or leave such rows out with "
                "`skip_malformed=True`."
            ) from None
        for name, place in text_places.items():
            columns[name].append(row[place])
        columns["label"].append(label)
        columns["idx"].append(idx)
    if not columns["idx"]:
        raise ValueError(f"{path} must hold at least one example (got none).")
    if num_malformed:
        logger.warning(f"{path}: {num_malformed} malformed rows left out of {idx + 1}.")
    return Dataset.from_dict(columns, features=task.features)


def _read_lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The lines that are not blank, as (line number from 1, fields)."""
    opener = gzip.open if path.suffix == ".gz" else open
    # Only "\n" ends a line: the texts hold other characters that Python takes for line ends.
    with opener(path, "rt", encoding="utf-8-sig", newline="\n") as file:
        try:
            for number, line in enumerate(file, start=1):
                line = line.rstrip("\r\n")
                if line:
                    yield number, line.split("\t")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} must be UTF-8 text: {error}.") from None


def _parse_label(text: str, task: GlueTask) -> int | float:
    if not task.is_regression:
        if text not in task.labels_in_file:
            raise ValueError(
                f"the column {task.label_column!r} must be one of "
                f"{', '.join(map(repr, task.labels_in_file))}, got {text!r}"
            )
        return task.labels_in_file.index(text)
    try:
        score = float(text)
    except ValueError:
        score = float("nan")
    if not 0 <= score <= 5:
        raise ValueError(f"the column {task.label_column!r} must be a number from 0 to 5, got {text!r}")
    return score
