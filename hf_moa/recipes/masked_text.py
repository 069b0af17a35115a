"""Text for masked language models: its flags, how it becomes sequences, and which tokens are masked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    DataCollatorForTokenClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    default_data_collator,
)

from hf_moa.modeling.core.task_losses import IGNORE_INDEX

from .text_blocks import SplitTextArguments, encode, position_limit


@dataclass
class MaskedTextArguments(SplitTextArguments):
    """Which texts to train and evaluate on, and how they are cut up and masked."""

    max_seq_length: int = field(default=128, metadata={"help": "Tokens per sequence."})
    mlm_probability: float = field(default=0.15, metadata={"help": "Share of tokens to predict."})
    line_by_line: bool = field(
        default=False,
        metadata={"help": "A line is a sequence, cut off at max_seq_length; blank ones are left out."},
    )
    pad_to_max_length: bool = field(
        default=False,
        metadata={"help": "Of line_by_line: pad to max_seq_length, not to the longest of a batch."},
    )

    def __post_init__(self):
        super().__post_init__()
        if self.max_seq_length < 3:
            raise ValueError(
                "`max_seq_length` must be at least 3, for [CLS], a token and [SEP] (got "
                f"{self.max_seq_length})."
            )
        if self.pad_to_max_length and not self.line_by_line:
            raise ValueError(
                "`pad_to_max_length` needs `line_by_line`: packed sequences are full (got False)."
            )
        if not 0 < self.mlm_probability < 1:
            raise ValueError(f"`mlm_probability` must be between 0 and 1 (got {self.mlm_probability}).")


class MaskedSequences(Dataset):
    """Sequences with tokens masked as BERT's: of those to predict, 80 % are `[MASK]`, 10 % another
    token, 10 % as they were.

    The masks of a sequence follow only from the seed, the epoch and its place, so that a resumed run
    sees the same. Here the epoch stays: evaluations compare.

    Args:
        ids: of all sequences, one after another.
        lengths: of each sequence.
    """

    def __init__(
        self,
        ids: np.ndarray,
        lengths: np.ndarray,
        tokenizer: PreTrainedTokenizerBase,
        *,
        probability: float,
        seed: int,
    ):
        self.ids, self.lengths = torch.from_numpy(ids), lengths.tolist()
        self.starts = (lengths.cumsum() - lengths).tolist()
        self.special_ids = torch.tensor(tokenizer.all_special_ids)
        self.tokenizer, self.probability, self.seed, self.epoch = tokenizer, probability, seed, 0

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(hash((self.seed, self.epoch, index)) % 2**63)
        ids = self.ids[self.starts[index] :][: self.lengths[index]].clone()
        draw = torch.rand(len(ids), generator=generator)
        draw[torch.isin(ids, self.special_ids)] = 1
        if (draw >= self.probability).all() and draw.min() < 1:
            draw[draw.argmin()] = 0  # as BERT's: one at least, so that no short batch lacks labels
        predicted = draw < self.probability
        labels = torch.where(predicted, ids, IGNORE_INDEX)
        others = torch.randint(len(self.tokenizer), ids.shape, generator=generator)
        ids[predicted & (draw < 0.8 * self.probability)] = self.tokenizer.mask_token_id
        replaced = predicted & (draw >= 0.9 * self.probability)
        ids[replaced] = others[replaced]
        return {"input_ids": ids, "labels": labels}


class RemaskedSequences(MaskedSequences):
    """The same with other masks in every epoch."""

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def pack(
    lines: list[str], tokenizer: PreTrainedTokenizerBase, data_args: MaskedTextArguments
) -> tuple[np.ndarray, np.ndarray]:
    """Full sequences of the lines, each followed by `[SEP]`: `ids` and `lengths` for `MaskedSequences`.

    A sequence begins with `[CLS]`; what does not fill the last one is left out, so nothing is padding.
    """
    length = data_args.max_seq_length
    ids, lengths = encode(
        lines, tokenizer, data_args.preprocessing_num_workers, add_special_tokens=False
    )
    ids = np.insert(ids, lengths.cumsum(), tokenizer.sep_token_id)
    sequences = ids[: len(ids) // (length - 1) * (length - 1)].reshape(-1, length - 1)
    if not len(sequences):
        raise ValueError(f"The text must fill a sequence of {length} tokens (`max_seq_length`).")
    ids = np.insert(sequences, 0, tokenizer.cls_token_id, axis=1).flatten()
    return ids, np.full(len(sequences), length)


def separate(
    lines: list[str], tokenizer: PreTrainedTokenizerBase, data_args: MaskedTextArguments
) -> tuple[np.ndarray, np.ndarray]:
    """A sequence for each line: `ids` and `lengths` for `MaskedSequences`."""
    workers, length = data_args.preprocessing_num_workers, data_args.max_seq_length
    return encode(lines, tokenizer, workers, truncation=True, max_length=length)


def check_sequence_length(data_args: MaskedTextArguments, model: PreTrainedModel) -> None:
    """Raise a ValueError where sequences are longer than the model takes."""
    limit = position_limit(model)
    if limit is not None and data_args.max_seq_length > limit:
        raise ValueError(
            f"`max_seq_length` must be at most the {limit} positions of the model (got "
            f"{data_args.max_seq_length})."
        )


def masked_sets(
    lines: dict[str, list[str]],
    tokenizer: PreTrainedTokenizerBase,
    data_args: MaskedTextArguments,
    seed: int,
) -> dict[str, MaskedSequences]:
    """The sequences of each split; of "train", with other masks in every epoch.

    Raises:
        ValueError: the tokenizer has no token for masks, or for a sequence's beginning or end; a text is
            too short.
    """
    needed = ("mask_token", "cls_token", "sep_token")
    if missing := [name for name in needed if getattr(tokenizer, name) is None]:
        raise ValueError(
            f"The tokenizer must have a {' and a '.join(missing)}, as BERT's and RoBERTa's do (got "
            f"none in {type(tokenizer).__name__})."
        )
    sets = {}
    for split, text in lines.items():
        text = [line.rstrip("\r\n") for line in text if line.strip()]
        make_sequences = separate if data_args.line_by_line else pack
        kind = RemaskedSequences if split == "train" else MaskedSequences
        sets[split] = kind(
            *make_sequences(text, tokenizer, data_args),
            tokenizer,
            probability=data_args.mlm_probability,
            seed=seed,
        )
    return sets


def masked_collator(
    tokenizer: PreTrainedTokenizerBase, data_args: MaskedTextArguments
) -> Callable[..., Any]:
    """Makes batches of them. Packed sequences are all of one length."""
    if not data_args.line_by_line:
        return default_data_collator
    return DataCollatorForTokenClassification(  # pads labels, too
        tokenizer,
        padding="max_length" if data_args.pad_to_max_length else "longest",
        max_length=data_args.max_seq_length,
    )
