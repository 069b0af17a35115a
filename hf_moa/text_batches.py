"""Batches for any of the models from a text file, a table of columns or a dataset of the Hub."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DataCollatorForLanguageModeling, PreTrainedModel, PreTrainedTokenizerBase

from hf_moa.extras import from_extra
from hf_moa.gated_models import auto_class_names

with from_extra("analysis"):
    from datasets import Dataset, load_dataset

# Files with other endings hold a text on each line.
_READERS: dict[str, tuple[str, dict[str, Any]]] = {
    # "NA" and "null" are words
    ".csv": ("csv", {"keep_default_na": False}),
    # no quotes: what GLUE's files, and tab-separated ones in general, mean
    ".tsv": ("csv", {"sep": "\t", "quoting": csv.QUOTE_NONE, "keep_default_na": False}),
    ".json": ("json", {}),
    ".jsonl": ("json", {}),
    ".parquet": ("parquet", {}),
}
_ROLES = ("text", "pair", "label", "target")
_WITH_TARGET = ("AutoModelForSeq2SeqLM", "AutoModel")


def read_text(
    source: str,
    *,
    columns: dict[str, str] | None = None,
    target_file: str | None = None,
    subset: str | None = None,
    split: str = "test",
    limit: int | None = None,
) -> Dataset:
    """Examples with the columns `text` and, where they are there, `pair`, `label` and `target`.

    Args:
        source: a file, plain or compressed (.csv, .tsv, .json, .jsonl or .parquet; any other holds a
            text on each line), else the name of a dataset of the Hub.
        columns: role -> the source's column, where their names differ.
        target_file: a text file beside a text file: line by line the decoder's side.
        subset, split: of a dataset of the Hub.
        limit: the first so many examples; None for all.

    Raises:
        ValueError: no such file or column, files of unequal length, no text.
    """
    columns = columns or {}
    data = _load(source, subset, split)
    names = {role: columns.get(role, role) for role in _ROLES}
    missing = [name for role, name in names.items() if role in columns and name not in data.column_names]
    if names["text"] not in data.column_names:
        missing = [names["text"], *(name for name in missing if name != names["text"])]
    if missing:
        raise ValueError(
            f"{source} must have a column {missing[0]!r} (got {', '.join(data.column_names)}); name the "
            "column of each role."
        )
    found = {role: name for role, name in names.items() if name in data.column_names}
    data = data.select_columns(list(found.values()))
    data = data.rename_columns({name: role for role, name in found.items() if name != role})
    if target_file is not None:
        targets = _load(target_file, None, split)
        if len(targets) != len(data):
            raise ValueError(
                f"{target_file} must have as many lines as {source} (got {len(targets)} and "
                f"{len(data)})."
            )
        data = data.add_column("target", targets["text"])
    data = data if limit is None else data.select(range(min(limit, len(data))))
    written = [i for i, text in enumerate(data["text"]) if text is not None and str(text).strip()]
    if not written:
        raise ValueError(f"{source} must hold text (got {len(data)} rows without any).")
    return data if len(written) == len(data) else data.select(written)


def _load(source: str, subset: str | None, split: str) -> Dataset:
    path = Path(source)
    if not path.is_file():
        if path.suffix or path.is_absolute() or path.is_dir():
            raise ValueError(f"data must be a file or a dataset's name (got {source}: no such file).")
        return load_dataset(source, subset, split=split)
    ending = Path(path.stem).suffix if path.suffix in (".gz", ".bz2", ".xz") else path.suffix
    reader, options = _READERS.get(ending, ("text", {}))
    try:
        return load_dataset(reader, data_files=str(path), split="train", **options)
    except Exception as error:  # the readers raise whatever their parsers do
        cause = error.__cause__ or error
        raise ValueError(
            f"{source} must hold rows that can be read as {reader} in UTF-8 (got "
            f"{type(cause).__name__}: {' '.join(str(cause).split())[:200]})."
        ) from error


class TextBatches:
    """Batches of a model's arguments, the same in every pass.

    Args:
        data: of `read_text`.
        tokenizer: of the model.
        model: one of hf_moa's.
        with_labels: add labels: tokens for causal models, masked tokens for masked ones (whose inputs
            are masked then), the `label` for classifiers. Encoder-decoder models always have their
            `target`.
        batch_size: sequences of a batch.
        max_length: tokens of a sequence, cut off beyond; default: the model's positions, at most 512.
        seed: of the masks.

    Raises:
        ValueError: encoder-decoder models: data without `target`; classifiers with labels: data without
            `label`.
    """

    def __init__(
        self,
        data: Dataset,
        tokenizer: PreTrainedTokenizerBase,
        model: PreTrainedModel,
        *,
        with_labels: bool,
        batch_size: int = 16,
        max_length: int | None = None,
        seed: int = 0,
    ):
        self.data = data
        self.tokenizer = tokenizer
        self.kind = auto_class_names(model.config).get(type(model).__name__)
        self.batch_size = batch_size
        self.seed = seed
        positions = model.config.max_tokens or 512
        self.max_length = min(max_length or 512, positions)
        self.with_labels = with_labels and self.has_labels
        self.num_labels = getattr(model.config, "num_labels", 0)
        self.label_ids = getattr(model.config, "label2id", None) or {}
        if self.kind == "AutoModelForMultipleChoice":
            raise ValueError(
                f"{type(model).__name__} takes several texts an example, which text data has not."
            )
        self.has_target = model.config.is_encoder_decoder and self.kind in _WITH_TARGET
        if self.has_target and "target" not in data.column_names:
            raise ValueError(
                f"{type(model).__name__} reads two sides: data must have a target column, or a target "
                "file beside it."
            )
        if tokenizer.pad_token is None:  # GPT-2's; masks tell them apart
            tokenizer.pad_token = tokenizer.eos_token

    @property
    def has_labels(self) -> bool:
        """Whether there is something to measure the model against."""
        if self.kind == "AutoModelForSequenceClassification":
            # test sets hide their labels behind -1
            return "label" in self.data.column_names and not any(
                label is None or label == -1 for label in self.data["label"]
            )
        return self.kind in ("AutoModelForMaskedLM", "AutoModelForCausalLM", "AutoModelForSeq2SeqLM")

    def __len__(self) -> int:
        return -(-len(self.data) // self.batch_size)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        mask = None
        if self.with_labels and self.kind == "AutoModelForMaskedLM":
            mask = DataCollatorForLanguageModeling(self.tokenizer, seed=self.seed)
        for start in range(0, len(self.data), self.batch_size):
            yield self._batch(self.data[start : start + self.batch_size], mask)

    def collate(self, examples: list[dict[str, Any]]) -> dict[str, Tensor]:
        """A batch of some examples of the data, as a collator of `Trainer`; tokens are masked anew each
        time."""
        mask = None
        if self.with_labels and self.kind == "AutoModelForMaskedLM":
            mask = DataCollatorForLanguageModeling(self.tokenizer)
        return self._batch({role: [each[role] for each in examples] for role in examples[0]}, mask)

    def _batch(
        self, examples: dict[str, list], mask: DataCollatorForLanguageModeling | None
    ) -> dict[str, Tensor]:
        sides = [_as_text(examples, role) for role in ("text", "pair") if role in examples]
        batch = dict(self._encode(*sides))
        if self.has_target:
            target = self._encode(text_target=_as_text(examples, "target"))
            batch["labels"] = self._ignoring_padding(target)
        elif self.with_labels and mask is not None:
            batch |= self._masked(mask, batch)
        elif self.with_labels and self.kind == "AutoModelForCausalLM":
            batch["labels"] = self._ignoring_padding(batch)
        elif self.with_labels:
            batch["labels"] = self._labels(examples["label"])
        return batch

    def _encode(self, *sides: list[str], **options: Any) -> Any:
        return self.tokenizer(
            *sides,
            truncation=True,
            max_length=self.max_length,
            padding=True,
            padding_side="right",  # positions are counted from the left
            return_tensors="pt",
            **options,
        )

    @staticmethod
    def _ignoring_padding(encoded: Any) -> Tensor:
        return encoded["input_ids"].masked_fill(encoded["attention_mask"] == 0, -100)

    @staticmethod
    def _masked(collator: DataCollatorForLanguageModeling, batch: dict) -> dict[str, Tensor]:
        """Inputs and labels; special tokens are never masked, padding among them."""
        masked = collator([{"input_ids": ids} for ids in batch["input_ids"]])
        return {name: masked[name] for name in ("input_ids", "labels")}

    def _labels(self, labels: list[Any]) -> Tensor:
        if isinstance(labels[0], str):
            unknown = sorted({label for label in labels if label not in self.label_ids})
            if unknown:
                raise ValueError(
                    f"label must be one of the model's, {', '.join(map(str, self.label_ids))} (got "
                    f"{unknown[0]!r})."
                )
            labels = [self.label_ids[label] for label in labels]
        if isinstance(labels[0], (list, tuple)):  # several labels each
            return torch.tensor(labels, dtype=torch.float)
        wrong = [
            label for label in labels if isinstance(label, int) and not 0 <= label < self.num_labels
        ]
        if wrong and self.num_labels > 1:
            raise ValueError(f"label must be from 0 to {self.num_labels - 1} (got {wrong[0]}).")
        is_regression = self.num_labels == 1
        return torch.tensor(labels, dtype=torch.float if is_regression else None)


def _as_text(examples: dict[str, list], role: str) -> list[str]:
    for text, value in zip(examples["text"], examples[role], strict=True):
        if value is None:
            raise ValueError(f"every text must have a {role} beside it (got none beside {text!r}).")
    return list(map(str, examples[role]))
