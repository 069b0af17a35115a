"""Text for language models, of files or the Hub: its flags, and how it is packed into blocks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import datasets
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_moa.modeling.core.task_losses import IGNORE_INDEX

from .command_line import check_counts, optional
from .files import is_table, read_lines, read_rows, text_column
from .models import ModelArguments


@dataclass
class TextFileArguments:
    """Which texts to train and evaluate on."""

    dataset_name: str | None = optional("Data set of the Hub, instead of files.")
    dataset_config_name: str | None = optional("Its configuration.")
    train_file: str | None = optional(
        "Training text, plain or .gz; of .csv, .json or .jsonl, the column `text` or else the first."
    )
    validation_file: str | None = optional("Text to evaluate on while and after training.")

    def __post_init__(self):
        if self.dataset_name is not None and any(self.files().values()):
            raise ValueError(
                "Give either `dataset_name` or files, not both (got "
                f"{self.dataset_name!r} and {[f for f in self.files().values() if f]})."
            )

    def files(self) -> dict[str, str | None]:
        return {
            "train": self.train_file,
            "validation": self.validation_file,
            "test": getattr(self, "test_file", None),
        }


@dataclass
class SplitTextArguments(TextFileArguments):
    """The same, and what else is evaluated on, and who tokenises."""

    validation_split_percentage: int = field(
        default=5,
        metadata={
            "help": "Evaluate on this part of the training text, its beginning, where there is no "
            "validation text; 0: on none."
        },
    )
    preprocessing_num_workers: int | None = optional("Processes that tokenise. Default: this one.")

    def __post_init__(self):
        super().__post_init__()
        if not 0 <= self.validation_split_percentage < 100:
            raise ValueError(
                "`validation_split_percentage` must be at least 0 and less than 100 (got "
                f"{self.validation_split_percentage})."
            )
        check_counts(self, "preprocessing_num_workers")


class TextBlocks(Dataset):
    """A text's tokens in blocks for a causal language model.

    A block begins with the last token of the one before, and the last block reaches back to be a
    whole one; labels leave out what another block predicts. So every token but the first is predicted
    exactly once, and no block is padded.

    Args:
        lines: the text. A token that stands for its beginning is put before it.
        block_size: tokens per block, at least 2.
        workers: processes that tokenise; none: this one.
    """

    def __init__(
        self,
        lines: list[str],
        tokenizer: PreTrainedTokenizerBase,
        block_size: int,
        workers: int | None = None,
    ):
        start = tokenizer.bos_token_id
        if start is None:
            start = tokenizer.eos_token_id
        if start is None:
            raise ValueError(
                "The tokenizer must have a bos_token or eos_token, to begin a text with (got neither)."
            )
        ids, _ = encode(lines, tokenizer, workers, add_special_tokens=False)
        self.ids = torch.from_numpy(np.insert(ids, 0, start))
        self.block_size = block_size
        self.num_words = sum(len(line.split()) for line in lines)
        self.num_lines = len(lines)

    def __len__(self) -> int:
        return math.ceil((len(self.ids) - 1) / (self.block_size - 1))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        first = index * (self.block_size - 1)
        end = min(first + self.block_size, len(self.ids))
        start = max(0, end - self.block_size)
        labels = self.ids[start:end].clone()
        labels[: first + 1 - start] = IGNORE_INDEX
        return {"input_ids": self.ids[start:end], "labels": labels}


class FirstSamples(Subset):
    """The first samples of a data set, which may differ from epoch to epoch, as masks do."""

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)


def first_samples(samples: Any, max_samples: int | None) -> Any:
    """The first `max_samples` of them; all where that is None or more than there are."""
    if max_samples is None or max_samples >= len(samples):
        return samples
    return FirstSamples(samples, range(max_samples))


def encode(
    lines: list[str], tokenizer: PreTrainedTokenizerBase, workers: int | None = None, **options
) -> tuple[np.ndarray, np.ndarray]:
    """The token ids of all lines, one after another, and each line's number of them.

    Args:
        workers: processes that tokenise; none: this one.
        options: of the tokenizer.
    """

    def encode_batch(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return {"ids": tokenizer(batch["line"], verbose=False, **options)["input_ids"]}

    if not lines:  # `map` would make no column
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    encoded = datasets.Dataset.from_dict({"line": lines}).map(
        encode_batch,
        batched=True,
        remove_columns="line",
        features=datasets.Features({"ids": datasets.List(datasets.Value("int64"))}),
        num_proc=workers,
        desc="Tokenizing",
    )
    chunks = encoded.with_format("arrow")[:]["ids"].chunks
    parts = [chunk.flatten() for chunk in chunks], [chunk.value_lengths() for chunk in chunks]
    ids, lengths = (np.concatenate(each, dtype=np.int64) for each in parts)
    return ids, lengths


def load_lines(model_args: ModelArguments, data_args: TextFileArguments, split: str) -> list[str]:
    """The text of a split, as lines with their ends."""
    if data_args.dataset_name is None:
        path, flag = data_args.files()[split], f"{split}_file"
        if path is None:
            raise ValueError(f"The {split} text is needed: give `{split}_file` or `dataset_name`.")
        if is_table(path):
            return _with_ends(text_column(read_rows(path, flag), flag))
        return read_lines(path, flag)
    texts = model_args.load_dataset(data_args.dataset_name, data_args.dataset_config_name, split=split)
    return _with_ends(texts["text" if "text" in texts.column_names else texts.column_names[0]])


def _with_ends(texts: Iterable[str]) -> list[str]:
    return [text if text.endswith("\n") else text + "\n" for text in texts]


def load_splits(model_args: ModelArguments, data_args: SplitTextArguments) -> dict[str, list[str]]:
    """The training text and the validation text, or a part of the training text instead."""
    lines = load_lines(model_args, data_args, "train")
    if data_args.dataset_name is None:
        has_validation = data_args.validation_file is not None
    else:
        name, config = data_args.dataset_name, data_args.dataset_config_name
        has_validation = "validation" in model_args.load_dataset(name, config)
    if has_validation:
        return {"train": lines, "validation": load_lines(model_args, data_args, "validation")}
    percentage = data_args.validation_split_percentage
    if not percentage:
        return {"train": lines}
    cut = round(len(lines) * percentage / 100)
    if not 0 < cut < len(lines):
        raise ValueError(
            "`validation_split_percentage` must leave lines to train and to evaluate on (got "
            f"{percentage} of {len(lines)} lines). Give `validation_file`, or 0 to not evaluate."
        )
    return {"train": lines[cut:], "validation": lines[:cut]}


def position_limit(model: PreTrainedModel) -> int | None:
    """The most tokens that a model takes, gated or not; None where there is no limit."""
    positions = getattr(model.config, "max_position_embeddings", None)
    return getattr(model.config, "max_tokens", positions)


def check_block_size(block_size: int | None, model: PreTrainedModel) -> int:
    limit = position_limit(model) or 1024
    if block_size is None:
        return min(limit, 1024)
    if not 2 <= block_size <= limit:
        raise ValueError(
            f"`block_size` must be between 2 and the {limit} positions of the model (got "
            f"{block_size}). A model from scratch takes more with --config_overrides n_positions=..."
        )
    return block_size
