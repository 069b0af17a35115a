"""A script's run on `Trainer`: logs, the checkpoint to resume from, results, budgets, the model card."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Sized
from pathlib import Path
from typing import Any, cast

import datasets
import transformers
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from hf_moa.hub_names import hub_name
from hf_moa.training import evaluate_budgets, format_budget_table

logger = logging.getLogger("hf_moa.recipes")  # of all modules here


def set_up_logging(training_args: TrainingArguments, *loggers: logging.Logger) -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):  # text that a console cannot show ends no run
        sys.stdout.reconfigure(errors="replace")
    logging.basicConfig(
        format="%(asctime)s - %(levelname)s - %(name)s - %(message)s",
        datefmt="%m/%d/%Y %H:%M:%S",
        handlers=[logging.StreamHandler(sys.stdout)],
    )
    if training_args.should_log:
        # The default --log_level, "passive", keeps what is set here.
        transformers.utils.logging.set_verbosity_info()
    level = training_args.get_process_log_level()
    for each in (logger, logging.getLogger("hf_moa.training"), *loggers):
        each.setLevel(level)
    datasets.utils.logging.set_verbosity(level)
    transformers.utils.logging.set_verbosity(level)
    logger.debug(f"Training parameters: {training_args}")


def find_checkpoint(training_args: TrainingArguments) -> str | None:
    """The checkpoint to resume from: the one asked for, or the last one in `output_dir`."""
    if training_args.resume_from_checkpoint is not None:
        return training_args.resume_from_checkpoint
    if not (training_args.do_train and Path(_folder_of(training_args)).is_dir()):
        return None
    checkpoint = get_last_checkpoint(_folder_of(training_args))
    if checkpoint is not None:
        logger.info(f"Resuming from {checkpoint}; to train from the start, give another --output_dir.")
    return checkpoint


def _folder_of(training_args: TrainingArguments) -> str:
    return cast(str, training_args.output_dir)  # its `__post_init__` leaves no None


def train(trainer: Trainer, checkpoint: str | None) -> None:
    result = trainer.train(resume_from_checkpoint=checkpoint)
    metrics = {
        **result.metrics,
        "train_samples": len(cast(Sized, trainer.train_dataset)),
        "trainable_parameters": trainer.get_num_trainable_parameters(),
    }
    trainer.save_model()
    write_metrics(trainer, "train", metrics)
    trainer.save_state()


def write_metrics(trainer: Trainer, name: str, metrics: dict[str, Any]) -> None:
    """Print metrics, and write them to `<name>_results.json` and `all_results.json`."""
    trainer.log_metrics(name, metrics)
    trainer.save_metrics(name, metrics)


def evaluate_at_budgets(trainer: Trainer, eval_sets: dict) -> None:
    first = None
    for name, dataset in eval_sets.items():
        rows = evaluate_budgets(trainer, dataset)
        first = first or rows
        if trainer.is_world_process_zero():
            print(f"\n{name}, {len(dataset)} examples\n\n{format_budget_table(rows)}\n")
            path = Path(_folder_of(trainer.args), f"budget_results_{name}.json")
            path.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    # of the set whose size the model's card has; a plain `Trainer` carries it too
    trainer.budget_rows = first  # type: ignore[attr-defined]


def data_for_card(name: str | None, config: str | None = None) -> dict[str, Any]:
    """What a card is told of a data set of the Hub; nothing of files, or of a folder of them."""
    found = hub_name(name)
    return {} if found is None else {"dataset": found, "dataset_tags": found, "dataset_args": config}


def finish(trainer: Trainer, **card: Any) -> None:
    """Push the model with its card, or write the card beside it, with all that was measured."""
    if trainer.args.push_to_hub:
        trainer.push_to_hub(**card)
    elif trainer.args.do_train:
        trainer.create_model_card(**card)
