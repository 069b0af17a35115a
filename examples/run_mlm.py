"""Trains a masked language model on text files with `MoaTrainer`, and measures perplexity: a gated BERT
(MAE, MoA, sparse experts, CCT, nested budgets) from scratch or from a checkpoint, or the plain one.

The flags are those of transformers' own `run_mlm.py` where it has them, plus `GatingArguments` and
`TeacherArguments`. A RoBERTa that goes on learning on your text, with MAE:

    python examples/run_mlm.py --model_name_or_path FacebookAI/roberta-base --attention_type mae \
        --train_file train.txt.gz --validation_file valid.txt --max_seq_length 128 \
        --do_train --do_eval --learning_rate 5e-5 --output_dir out/roberta-mae

From scratch on WikiText-2, with a WordPiece vocabulary trained on the way:

    python examples/run_mlm.py --model_type moa_bert --attention_type mha \
        --config_overrides hidden_size=256,num_hidden_layers=4,intermediate_size=1024 \
        --train_file train.txt.gz --validation_file valid.txt --do_train --do_eval \
        --num_train_epochs 10 --learning_rate 5e-4 --warmup_steps 500 --output_dir out/mlm

Budgets that learn from the model that they are made of: all in each step.

    python examples/run_mlm.py --model_name_or_path out/mlm --teacher out/mlm \
        --attention_type mha --nested_budgets 1 0.5 0.33 --budget_sampling all \
        --train_file train.txt.gz --validation_file valid.txt --do_train --do_eval --eval_budgets \
        --output_dir out/mlm-budgets

Text is packed into sequences without padding, or each line is one (`--line_by_line`). Which tokens are
masked follows from the seed, the epoch and the place of the sequence, so that a resumed run sees the
same. `eval_results.json` has `perplexity`, exp of the mean loss of the masked tokens, and `accuracy`,
the share of them that is predicted. The arguments can stand in one JSON file instead.
"""

import logging
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForMaskedLM, EvalPrediction, set_seed

from hf_moa.modeling.core.task_losses import IGNORE_INDEX
from hf_moa.quickstart.tokenizer import train_tokenizer
from hf_moa.recipes.command_line import optional, parse_arguments
from hf_moa.recipes.gating import GatingArguments
from hf_moa.recipes.masked_text import (
    MaskedTextArguments,
    check_sequence_length,
    masked_collator,
    masked_sets,
)
from hf_moa.recipes.models import ModelArguments, load_model, load_tokenizer
from hf_moa.recipes.splitting import SplitArguments, split_model
from hf_moa.recipes.teachers import TeacherArguments
from hf_moa.recipes.text_blocks import first_samples, load_lines, load_splits
from hf_moa.recipes.tokenizers import token_fields
from hf_moa.recipes.trainer_runs import (
    data_for_card,
    evaluate_at_budgets,
    find_checkpoint,
    finish,
    set_up_logging,
    train,
    write_metrics,
)
from hf_moa.training import MoaTrainer, MoaTrainingArguments

logger = logging.getLogger(__name__)


@dataclass
class DataTrainingArguments(MaskedTextArguments):
    """Which texts to train and evaluate on, and how they are cut up and masked."""

    max_train_samples: int | None = optional("Train on the first so many sequences only.")
    max_eval_samples: int | None = optional("Evaluate on the first so many sequences only.")


def token_scores(logits, labels: Tensor) -> Tensor:
    """`[B, T, 2]`: each token's loss, and 1 where it is predicted. `Trainer` keeps these, not logits."""
    logits = logits[0] if isinstance(logits, tuple) else logits
    losses = cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="none"
    )
    hits = (logits.argmax(dim=-1) == labels).float()
    return torch.stack([losses.view(labels.shape), hits], dim=-1)


def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
    is_masked = prediction.label_ids != IGNORE_INDEX
    # `Trainer`'s own loss is a mean over batches, whose numbers of masked tokens differ.
    token_loss, accuracy = prediction.predictions[is_masked].mean(axis=0, dtype=np.float64).tolist()
    return {
        "token_loss": token_loss,
        "perplexity": math.exp(token_loss),
        "accuracy": accuracy,
        "tokens": int(is_masked.sum()),
    }


def main(args: list[str] | None = None) -> None:
    model_args, data_args, gating_args, teacher_args, split_args, training_args = parse_arguments(
        args,
        ModelArguments,
        DataTrainingArguments,
        GatingArguments,
        TeacherArguments,
        SplitArguments,
        MoaTrainingArguments,
    )
    set_up_logging(training_args, logger)
    checkpoint = find_checkpoint(training_args)
    tokenizer = load_tokenizer(model_args, checkpoint)
    does_evaluate = training_args.do_eval or gating_args.eval_budgets
    with training_args.main_process_first(desc="reading the text"):
        if training_args.do_train or tokenizer is None:
            lines = load_splits(model_args, data_args)
        else:
            lines = {"validation": load_lines(model_args, data_args, "validation")}
    if does_evaluate and "validation" not in lines:
        raise ValueError(
            "`do_eval` needs a text to evaluate on: give `validation_file`, or a "
            "`validation_split_percentage` above 0."
        )
    if tokenizer is None:
        tokenizer = train_tokenizer(lines["train"], model_args.vocab_size, data_args.max_seq_length)

    # The model comes right after the seed, so that variants draw what they share alike.
    set_seed(training_args.seed)
    fields = token_fields(tokenizer, "pad")
    model = load_model(AutoModelForMaskedLM, model_args, gating_args, tokenizer, fields)
    model = split_model(model, split_args)
    check_sequence_length(data_args, model)
    teacher = teacher_args.load(model, model_args)
    sets = masked_sets(lines, tokenizer, data_args, training_args.seed)
    for split, each in sets.items():
        logger.info(f"{split}: {len(each.ids):,} tokens in {len(each):,} sequences.")

    trainer = MoaTrainer(
        model=model,
        args=training_args,
        teacher=teacher,
        train_dataset=first_samples(sets["train"], data_args.max_train_samples)
        if training_args.do_train
        else None,
        eval_dataset=first_samples(sets["validation"], data_args.max_eval_samples)
        if does_evaluate
        else None,
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=token_scores,
        processing_class=tokenizer,
        data_collator=masked_collator(tokenizer, data_args),
    )
    if training_args.do_train:
        train(trainer, checkpoint)
    if training_args.do_eval:
        metrics = trainer.evaluate()
        write_metrics(trainer, "eval", metrics | {"eval_samples": len(trainer.eval_dataset)})
    if gating_args.eval_budgets:
        evaluate_at_budgets(trainer, {"validation": trainer.eval_dataset})
    finish(
        trainer,
        finetuned_from=model_args.model_name_or_path,
        tasks="fill-mask",
        **data_for_card(data_args.dataset_name, data_args.dataset_config_name),
    )


if __name__ == "__main__":
    main()
