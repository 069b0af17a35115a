"""Trains a translation model with Accelerate, on one process or many: a gated T5 (MAE by block
coordinate descent, MoA, sparse experts, CCT) from scratch or from a checkpoint, or the plain one.
Measures sacreBLEU of a beam search, of the averaged last checkpoints where asked.

The flags are those of transformers' own `run_translation_no_trainer.py`
(`hf_moa/recipes/accelerate/arguments.py` names the few that are left out), plus `GatingArguments` and
the gates' part of `MoaTrainingArguments`. From scratch, with a vocabulary trained on both languages on
the way (needs `pip install "hf-moa[translation]"`):

    accelerate launch examples/run_translation_no_trainer.py --model_type moa_t5 --attention_type mae \
        --config_overrides d_model=256,d_kv=32,num_heads=8,d_ff=1024,num_layers=3 \
        --train_source train.en.gz --train_target train.de.gz \
        --validation_source val.en.gz --validation_target val.de.gz --num_beams 5 \
        --num_train_epochs 20 --optim adafactor --learning_rate 3e-2 --num_warmup_steps 1000 \
        --label_smoothing_factor 0.1 --checkpointing_steps epoch --average_checkpoints 5 \
        --resume_from_checkpoint latest --output_dir out/translation

On several GPUs: `accelerate launch --config_file examples/accelerate/ddp.yaml`. A run that was killed
goes on from its last whole checkpoint, bit for bit, when it is started again.

Results: `all_results.json` (BLEU with sacreBLEU's signature in the log; of a CCT model at each budget),
`log.jsonl`, the model, its card (README.md) and its tokenizer in `output_dir`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForSeq2SeqLM, DataCollatorForSeq2Seq, EvalPrediction

from hf_moa.modeling.core.task_losses import IGNORE_INDEX
from hf_moa.recipes.accelerate import (
    About,
    AccelerateArguments,
    GatedTraining,
    checkpoint_to_resume,
    make_accelerator,
    mean_over_labels,
)
from hf_moa.recipes.command_line import check_counts, optional, parse_arguments
from hf_moa.recipes.gating import GatingArguments
from hf_moa.recipes.models import ModelArguments, load_model, load_tokenizer
from hf_moa.recipes.parallel_text import BleuMetric, ParallelTextArguments, load_pairs, tokenize
from hf_moa.recipes.tokenizers import train_translation_tokenizer, translation_token_fields

logger = logging.getLogger(__name__)


@dataclass
class DataTrainingArguments(ParallelTextArguments):
    """Which pairs of texts to train and evaluate on, and how they are prepared."""

    max_train_samples: int | None = optional("Train on the first so many pairs only.")
    max_eval_samples: int | None = optional("Evaluate on the first so many pairs only.")
    predict_with_generate: bool = field(
        default=True, metadata={"help": "Translate in evaluation, for BLEU; otherwise only the loss."}
    )
    num_beams: int = field(default=5, metadata={"help": "Beams of the search in evaluation."})

    def __post_init__(self):
        super().__post_init__()
        check_counts(self, "num_beams")


def main(args: list[str] | None = None) -> dict[str, float]:
    model_args, data_args, gating_args, run_args = parse_arguments(
        args, ModelArguments, DataTrainingArguments, GatingArguments, AccelerateArguments
    )
    accelerator = make_accelerator(run_args)
    splits = ["train", *(["validation"] if data_args.has("validation") else [])]
    pairs = {split: load_pairs(data_args, split, model_args) for split in splits}
    tokenizer = load_tokenizer(model_args, checkpoint_to_resume(run_args))
    if tokenizer is None:
        tokenizer = train_translation_tokenizer(pairs["train"], model_args.vocab_size)
    fields = translation_token_fields(tokenizer)
    model = load_model(AutoModelForSeq2SeqLM, model_args, gating_args, tokenizer, fields)
    most = {"train": data_args.max_train_samples, "validation": data_args.max_eval_samples}
    with accelerator.main_process_first():
        sets = {
            split: tokenize(text, tokenizer, data_args, most[split], split)
            for split, text in pairs.items()
        }
    collate = DataCollatorForSeq2Seq(
        tokenizer, model=model, label_pad_token_id=data_args.label_pad_token_id(tokenizer)
    )
    columns = ("input_ids", "attention_mask", "labels")

    evaluate = None
    if "validation" in sets:
        metric = None
        if data_args.predict_with_generate:
            metric = BleuMetric(tokenizer, sets["validation"])
        loader = accelerator.prepare_data_loader(
            DataLoader(
                sets["validation"].select_columns(columns),
                batch_size=run_args.per_device_eval_batch_size,
                collate_fn=collate,
            )
        )

        def evaluate(model) -> dict[str, float]:
            losses = mean_over_labels(accelerator, model, loader, shifts_labels=False)
            if metric is None:
                return losses
            gathered = [], [], []  # sources, translations, labels
            for batch in loader:
                with torch.no_grad():
                    ids = accelerator.unwrap_model(model).generate(
                        batch["input_ids"],
                        attention_mask=batch["attention_mask"],
                        num_beams=data_args.num_beams,
                        max_length=data_args.target_length("validation"),
                    )
                sources, ids, labels = (
                    accelerator.pad_across_processes(each, dim=1, pad_index=pad)
                    for each, pad in (
                        (batch["input_ids"], tokenizer.pad_token_id),
                        (ids, tokenizer.pad_token_id),
                        (batch["labels"], IGNORE_INDEX),
                    )
                )
                for found, each in zip(gathered, (sources, ids, labels), strict=True):
                    found.extend(accelerator.gather_for_metrics(each).cpu().numpy())
            sources, translations, labels = map(_padded, gathered)
            bleu = metric(EvalPrediction(translations, labels, sources))
            logger.info(f"sacreBLEU: {metric.signature}")
            return {**losses, **bleu}

    training = GatedTraining(
        accelerator,
        run_args,
        model,
        tokenizer,
        sets["train"].select_columns(columns),
        collate,
        evaluate,
        lengths=None if data_args.pad_to_max_length else list(sets["train"]["num_tokens"]),
        about=About.of("translation", model_args, data_args),
    )
    return training.train()


def _padded(sequences: list[np.ndarray]) -> np.ndarray:
    """Sequences of several lengths as one array, padded with what is ignored."""
    array = np.full((len(sequences), max(map(len, sequences))), IGNORE_INDEX, dtype=np.int64)
    for place, sequence in zip(array, sequences, strict=True):
        place[: len(sequence)] = sequence
    return array


if __name__ == "__main__":
    main()
