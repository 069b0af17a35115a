"""Parallel text for translation, of files or the Hub: its flags, how it is tokenised, and BLEU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from operator import add
from typing import cast

import numpy as np
from datasets import Dataset
from transformers import EvalPrediction, PreTrainedTokenizerBase

from hf_moa.extras import from_extra
from hf_moa.modeling.core.task_losses import IGNORE_INDEX

from .command_line import check_counts, optional
from .files import is_table, read_lines, read_rows
from .models import HubArguments

with from_extra("translation"):
    from sacrebleu.metrics import BLEU


@dataclass
class ParallelTextArguments:
    """Which pairs of texts to train and evaluate on: files, or a data set of the Hub."""

    dataset_name: str | None = optional("Data set of the Hub with a column `translation`, not files.")
    dataset_config_name: str | None = optional("Configuration of the data set.")
    train_file: str | None = optional(
        "Training pairs in one file: .json or .jsonl with `translation`, a text by language; .csv with "
        "a column by language."
    )
    validation_file: str | None = optional("Pairs to evaluate on in one file.")
    source_lang: str | None = optional("What there the sources are under, such as en.")
    target_lang: str | None = optional("What there the targets are under, such as de.")
    train_source: str | None = optional("Training text, a sentence a line, plain or .gz.")
    train_target: str | None = optional("Its translation, line by line.")
    validation_source: str | None = optional("Text for --do_eval.")
    validation_target: str | None = optional("Its translation.")
    preprocessing_num_workers: int | None = optional("Processes that tokenise. Default: this one.")
    source_prefix: str = field(
        default="", metadata={"help": "Put before every source text; T5 checkpoints want one."}
    )
    max_source_length: int = field(
        default=128, metadata={"help": "Longer sources are cut off at this number of tokens."}
    )
    max_target_length: int = field(
        default=128, metadata={"help": "The same for targets. BLEU is computed from whole targets."}
    )
    val_max_target_length: int | None = optional(
        "The same for targets to evaluate on, and for translations. Default: max_target_length."
    )
    pad_to_max_length: bool = field(
        default=False,
        metadata={"help": "Pad to these numbers of tokens, not to the longest of a batch."},
    )
    ignore_pad_token_for_loss: bool = field(
        default=True, metadata={"help": "Padding is no label; otherwise it is to be predicted."}
    )

    def __post_init__(self):
        files = [name for name in vars(self) if name.endswith(("_source", "_target", "_file"))]
        given = [name for name in files if getattr(self, name) is not None]
        if self.dataset_name is not None and given:
            raise ValueError(
                f"Give either `dataset_name` or files, not both (got {self.dataset_name!r} and "
                f"`{given[0]}`)."
            )
        check_counts(
            self,
            "preprocessing_num_workers",
            "max_source_length",
            "max_target_length",
            "val_max_target_length",
        )
        by_language = [] if self.dataset_name is None else ["dataset_name"]
        for split in ("train", "validation", "test"):
            if f"{split}_file" in given:
                self._check_file(split)
                by_language.append(f"{split}_file")
        if by_language and (self.source_lang is None or self.target_lang is None):
            raise ValueError(
                f"`{by_language[0]}` needs `source_lang` and `target_lang` (got "
                f"{self.source_lang!r} and {self.target_lang!r})."
            )

    def _check_file(self, split: str) -> None:
        path, source = getattr(self, f"{split}_file"), getattr(self, f"{split}_source")
        if not is_table(path):
            raise ValueError(
                f"`{split}_file` must be a .json, .jsonl or .csv file, plain or .gz (got {path}). Texts "
                f"line by line are for `{split}_source` and `{split}_target`."
            )
        if source is not None:
            raise ValueError(
                f"Give either `{split}_file` or `{split}_source`, not both (got {path} and {source})."
            )

    def target_length(self, split: str) -> int:
        """Most tokens of a target."""
        if split == "train" or self.val_max_target_length is None:
            return self.max_target_length
        return self.val_max_target_length

    def label_pad_token_id(self, tokenizer: PreTrainedTokenizerBase) -> int:
        return IGNORE_INDEX if self.ignore_pad_token_for_loss else tokenizer.pad_token_id

    def has(self, split: str) -> bool:
        """Whether there may be pairs of a split."""
        files = (getattr(self, f"{split}_file"), getattr(self, f"{split}_source"))
        return self.dataset_name is not None or any(files)


def load_pairs(
    data_args: ParallelTextArguments, split: str, hub: HubArguments | None = None
) -> dict[str, list[str]]:
    """The sentences of a split: `source` and `target`, of equal number.

    Args:
        hub: how a data set of the Hub is fetched.
    """
    if data_args.dataset_name is not None:
        return _pairs_of_dataset(data_args.dataset_name, data_args, split, hub or HubArguments())
    path = getattr(data_args, f"{split}_file")
    if path is not None:
        rows = read_rows(path, f"{split}_file")
        return _pairs_of_rows([row.get("translation", row) for row in rows], data_args)
    pairs = {}
    for side in ("source", "target"):
        flag = f"{split}_{side}"
        path = getattr(data_args, flag)
        if path is None:
            raise ValueError(
                f"`{flag}` is needed: give the {split} text as `{split}_source` and `{split}_target`, "
                f"or as `{split}_file`."
            )
        pairs[side] = [line.strip() for line in read_lines(path, flag)]
    numbers = {side: len(lines) for side, lines in pairs.items()}
    if numbers["source"] != numbers["target"]:
        raise ValueError(
            f"`{split}_source` and `{split}_target` must have equally many lines (got {numbers}). "
            "Line i of one is to be the translation of line i of the other."
        )
    return pairs


def _pairs_of_dataset(
    name: str, data_args: ParallelTextArguments, split: str, hub: HubArguments
) -> dict[str, list[str]]:
    pairs = hub.load_dataset(name, data_args.dataset_config_name, split=split)
    if "translation" not in pairs.column_names:
        raise ValueError(
            f"`dataset_name` must have a column 'translation' (got {', '.join(pairs.column_names)})."
        )
    return _pairs_of_rows(pairs["translation"], data_args)


def _pairs_of_rows(rows: Iterable[dict], data_args: ParallelTextArguments) -> dict[str, list[str]]:
    """Of rows with a text by language."""
    pairs: dict[str, list[str]] = {"source": [], "target": []}
    for i, row in enumerate(rows):
        found = row if isinstance(row, dict) else {}
        for side, texts in pairs.items():
            language = getattr(data_args, f"{side}_lang")
            if not isinstance(found.get(language), str):
                raise ValueError(
                    f"`{side}_lang` must be a language of every pair (got {language!r}; there are "
                    f"{', '.join(found) or 'none'} in pair {i})."
                )
            texts.append(found[language].strip())
    return pairs


def tokenize(
    pairs: dict[str, list[str]],
    tokenizer: PreTrainedTokenizerBase,
    data_args: ParallelTextArguments,
    max_samples: int | None,
    split: str = "train",
) -> Dataset:
    """Pairs as a model takes them, with their texts; `num_tokens` counts the tokens of both sides, which
    both are padded where pairs are grouped by length."""
    dataset = Dataset.from_dict({side: texts[:max_samples] for side, texts in pairs.items()})
    target_length, pad = data_args.target_length(split), data_args.label_pad_token_id(tokenizer)

    def tokenize_batch(examples):
        features = tokenizer(
            [data_args.source_prefix + text for text in examples["source"]],
            max_length=data_args.max_source_length,
            truncation=True,
            padding="max_length" if data_args.pad_to_max_length else False,
        )
        labels = tokenizer(text_target=examples["target"], max_length=target_length, truncation=True)
        labels = labels["input_ids"]
        if data_args.pad_to_max_length:
            labels = [each + [pad] * (target_length - len(each)) for each in labels]
        # T5 takes no segment ids, which some tokenizers return.
        features.pop("token_type_ids", None)
        lengths = map(add, map(len, features["input_ids"]), map(len, labels))
        return {**features, "labels": labels, "num_tokens": list(lengths)}

    return dataset.map(
        tokenize_batch,
        batched=True,
        num_proc=data_args.preprocessing_num_workers,
        desc="Tokenizing",
    )


class BleuMetric:
    """`compute_metrics` of a trainer that generates.

    The trainer hands over labels, which are cut off and may not decode to what the file says, in an
    order of its own (`group_by_length`): a reference is found by the ids of its pair. Pairs of the same
    ids, which are translated alike, take turns.

    Args:
        dataset: what will be evaluated on, from `tokenize`. The trainer must hand over its inputs:
            `include_for_metrics=["inputs"]`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, dataset: Dataset):
        self.tokenizer = tokenizer
        self.bleu = BLEU()
        self.references: dict[tuple[bytes, bytes], list[str]] = defaultdict(list)
        columns = (dataset[name] for name in ("input_ids", "labels", "target"))
        for inputs, labels, target in zip(*columns, strict=True):
            self.references[self._key(inputs, labels)].append(target)

    def _key(self, inputs: Sequence[int], labels: Sequence[int]) -> tuple[bytes, bytes]:
        padding = (IGNORE_INDEX, self.tokenizer.pad_token_id)
        arrays = (np.asarray(each, dtype=np.int64) for each in (inputs, labels))
        source, target = (each[~np.isin(each, padding)].tobytes() for each in arrays)
        return source, target

    def decode(self, predictions) -> list[str]:
        """`[N, T]` generated ids, padded with -100 too, as plain text."""
        predictions = predictions[0] if isinstance(predictions, tuple) else predictions
        ids = np.where(predictions == IGNORE_INDEX, self.tokenizer.pad_token_id, predictions)
        return [t.strip() for t in self.tokenizer.batch_decode(ids, skip_special_tokens=True)]

    def __call__(self, prediction: EvalPrediction) -> dict[str, float]:
        translations = self.decode(prediction.predictions)
        inputs = cast(np.ndarray, prediction.inputs)  # for which `include_for_metrics` asks
        pairs = zip(inputs, prediction.label_ids, strict=True)
        turns = {key: cycle(targets) for key, targets in self.references.items()}
        references = [next(turns[self._key(source, labels)]) for source, labels in pairs]
        return {"bleu": self.bleu.corpus_score(translations, [references]).score}

    @property
    def signature(self) -> str:
        return str(self.bleu.get_signature())
