"""Pretrains a masked language model with Accelerate, on one process or many: a gated BERT (MAE by block
coordinate descent, MoA, sparse experts, CCT) from scratch or from a checkpoint, or the plain one.

The flags are those of transformers' own `run_mlm_no_trainer.py`
(`hf_moa/recipes/accelerate/arguments.py` names the few that are left out), plus `GatingArguments` and
the gates' part of `MoaTrainingArguments`. From scratch on text files, with a WordPiece vocabulary
trained on the way:

    accelerate launch examples/run_mlm_no_trainer.py --model_type moa_bert --attention_type moa \
        --config_overrides \
        hidden_size=256,num_hidden_layers=4,intermediate_size=1024,initializer_range=0.06 \
        --num_attention_heads 8 --head_dim 32 --num_attention_experts 16 --max_seq_length 128 \
        --train_file train.txt.gz --validation_file valid.txt --num_train_epochs 10 \
        --learning_rate 5e-4 --num_warmup_steps 500 --checkpointing_steps 500 \
        --resume_from_checkpoint latest --output_dir out/mlm

`sparse_prediction=True` among the overrides computes only the logits of the masked tokens in training:
the same loss, sooner.

On several GPUs: `accelerate launch --config_file examples/accelerate/ddp.yaml` (or `fsdp2.yaml`, ...). A
run that was killed goes on from its last whole checkpoint, bit for bit, when it is started again.

Text is packed into sequences without padding, or each line is one (`--line_by_line`); which tokens are
masked follows from the seed, the epoch and the place of the sequence. Results: `all_results.json`
(perplexity of masked tokens; of a CCT model at each budget), `log.jsonl`, the model, its card
(README.md) and its tokenizer in `output_dir`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    AutoModelForMaskedLM,
    DataCollatorForTokenClassification,
    PreTrainedTokenizerBase,
    default_data_collator,
)

from hf_moa.modeling.core.task_losses import IGNORE_INDEX
from hf_moa.quickstart.tokenizer import train_tokenizer
from hf_moa.recipes.accelerate import (
    About,
    AccelerateArguments,
    GatedTraining,
    checkpoint_to_resume,
    make_accelerator,
    perplexity_of,
)
from hf_moa.recipes.command_line import parse_arguments
from hf_moa.recipes.gating import GatingArguments
from hf_moa.recipes.models import ModelArguments, load_model, load_tokenizer
from hf_moa.recipes.text_blocks import SplitTextArguments, encode, load_splits
from hf_moa.recipes.tokenizers import token_fields


@dataclass
class DataTrainingArguments(SplitTextArguments):
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
    lines: list[str], tokenizer: PreTrainedTokenizerBase, data_args: DataTrainingArguments
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
    lines: list[str], tokenizer: PreTrainedTokenizerBase, data_args: DataTrainingArguments
) -> tuple[np.ndarray, np.ndarray]:
    """A sequence for each line: `ids` and `lengths` for `MaskedSequences`."""
    workers, length = data_args.preprocessing_num_workers, data_args.max_seq_length
    return encode(lines, tokenizer, workers, truncation=True, max_length=length)


def main(args: list[str] | None = None) -> dict[str, float]:
    model_args, data_args, gating_args, run_args = parse_arguments(
        args, ModelArguments, DataTrainingArguments, GatingArguments, AccelerateArguments
    )
    accelerator = make_accelerator(run_args)
    with accelerator.main_process_first():
        lines = load_splits(model_args, data_args)
    tokenizer = load_tokenizer(model_args, checkpoint_to_resume(run_args))
    if tokenizer is None:
        tokenizer = train_tokenizer(lines["train"], model_args.vocab_size, data_args.max_seq_length)
    fields = token_fields(tokenizer, "pad")
    model = load_model(AutoModelForMaskedLM, model_args, gating_args, tokenizer, fields)
    if data_args.max_seq_length > model.config.max_position_embeddings:
        raise ValueError(
            f"`max_seq_length` must be at most the {model.config.max_position_embeddings} positions of "
            f"the model (got {data_args.max_seq_length})."
        )
    kinds = {"train": RemaskedSequences, "validation": MaskedSequences}
    sets = {}
    for split, text in lines.items():
        text = [line.rstrip("\r\n") for line in text if line.strip()]
        make_sequences = separate if data_args.line_by_line else pack
        ids, lengths = make_sequences(text, tokenizer, data_args)
        sets[split] = kinds[split](
            ids, lengths, tokenizer, probability=data_args.mlm_probability, seed=run_args.seed
        )
    collate, has_lengths = default_data_collator, False
    if data_args.line_by_line:
        has_lengths = not data_args.pad_to_max_length
        collate = DataCollatorForTokenClassification(  # pads labels, too
            tokenizer,
            padding="longest" if has_lengths else "max_length",
            max_length=data_args.max_seq_length,
        )

    evaluate = perplexity_of(
        accelerator,
        sets.get("validation"),
        run_args.per_device_eval_batch_size,
        shifts_labels=False,
        collate=collate,
    )
    training = GatedTraining(
        accelerator,
        run_args,
        model,
        tokenizer,
        sets["train"],
        collate,
        evaluate,
        lengths=sets["train"].lengths if has_lengths else None,
        about=About.of("fill-mask", model_args, data_args),
    )
    return training.train()


if __name__ == "__main__":
    main()
