"""Finetunes a model on extractive question answering (SQuAD 1.1) with `MoaTrainer`: an ungated baseline,
or a checkpoint converted to mixture-of-heads attention (MAE, MoA) and conditional computation (CCT).

The flags are those of transformers' own `run_qa.py` where it has them, plus `GatingArguments`,
`AdapterArguments` and `TeacherArguments`. From SQuAD's published files (without them,
`--dataset_name rajpurkar/squad`):

    python examples/run_qa.py --model_name_or_path google-bert/bert-base-uncased --attention_type mae \
        --cct_budgets 1 0.5 0.33 --eval_budgets \
        --train_file train-v1.1.json --validation_file dev-v1.1.json --do_train --do_eval \
        --learning_rate 3e-5 --num_train_epochs 2 --output_dir out/squad

Exact match and F1 are those of SQuAD's own script, in per cent. `--do_predict` writes the answers to the
questions of `--test_file` to `predict_predictions.json`, by their ids. The arguments can stand in one
JSON file instead: `python examples/run_qa.py arguments.json`.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from peft import TaskType
from transformers import (
    AutoModelForQuestionAnswering,
    DataCollatorWithPadding,
    PreTrainedTokenizerBase,
    default_data_collator,
    set_seed,
)

from hf_moa.recipes.adapters import AdapterArguments, adapt
from hf_moa.recipes.command_line import check_counts, optional, parse_arguments
from hf_moa.recipes.gating import GatingArguments, convert
from hf_moa.recipes.models import CheckpointArguments, load_tokenizer
from hf_moa.recipes.question_answering import (
    AnswerMetric,
    Features,
    check_ids,
    num_answered,
    read_squad,
)
from hf_moa.recipes.splitting import SplitArguments, split_model
from hf_moa.recipes.teachers import TeacherArguments
from hf_moa.recipes.tokenizers import set_padding
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

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)


@dataclass
class DataTrainingArguments:
    """Which questions to train and evaluate on, and how they are prepared."""

    dataset_name: str | None = optional("Data set of the Hub, instead of files.")
    train_file: str | None = optional("Questions in SQuAD's form (version 1.1), plain or .gz.")
    validation_file: str | None = optional("The same, to evaluate on.")
    test_file: str | None = optional("The same, for --do_predict; its questions need no answers.")
    max_seq_length: int = field(
        default=384, metadata={"help": "Tokens of a question with its context; longer ones are cut up."}
    )
    doc_stride: int = field(default=128, metadata={"help": "Tokens that two parts of a context share."})
    pad_to_max_length: bool = field(
        default=True,
        metadata={"help": "Pad all texts to max_seq_length; false: to the longest of each batch."},
    )
    n_best_size: int = field(default=20, metadata={"help": "Starts and ends that are combined."})
    max_answer_length: int = field(default=30, metadata={"help": "Tokens of an answer, at most."})
    max_train_samples: int | None = optional("Train on the first so many questions only.")
    max_eval_samples: int | None = optional("Evaluate on the first so many questions only.")
    max_predict_samples: int | None = optional("Answer the first so many test questions only.")

    def __post_init__(self):
        files = self.train_file, self.validation_file, self.test_file
        if (self.dataset_name is None) == (files == (None, None, None)):
            raise ValueError(
                "Give either `dataset_name`, or `train_file`, `validation_file` and `test_file`, as far "
                f"as they are needed (got {self.dataset_name!r}, and {', '.join(map(repr, files))})."
            )
        check_counts(self, "doc_stride", "n_best_size", "max_answer_length")
        if not self.doc_stride < self.max_seq_length:
            raise ValueError(
                "`doc_stride` must be less than `max_seq_length` (got "
                f"{self.doc_stride} and {self.max_seq_length})."
            )


def load_questions(
    data_args: DataTrainingArguments, model_args: CheckpointArguments, split: str
) -> Dataset:
    """The first questions of a split, as many as the flags want."""
    if data_args.dataset_name is not None:
        questions = model_args.load_dataset(data_args.dataset_name, split=split)
    else:
        path = getattr(data_args, f"{split}_file")
        if path is None:
            raise ValueError(f"The {split} questions are needed: give `{split}_file`.")
        questions = read_squad(path, f"{split}_file", need_answers=split != "test")
    if split == "test":
        check_ids(questions, data_args.dataset_name or f"`{split}_file`")
    most = {
        "train": data_args.max_train_samples,
        "validation": data_args.max_eval_samples,
        "test": data_args.max_predict_samples,
    }[split]
    return questions if most is None else questions.select(range(min(most, len(questions))))


def make_features(
    data_args: DataTrainingArguments,
    questions: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    *,
    keep_places: bool,
    with_answers: bool,
) -> Features:
    if not tokenizer.is_fast:
        raise ValueError(
            f"The tokenizer must be a fast one, which knows the places of its tokens (got "
            f"{type(tokenizer).__name__})."
        )
    return Features(
        questions,
        tokenizer,
        max_length=min(data_args.max_seq_length, tokenizer.model_max_length),
        stride=data_args.doc_stride,
        pad_to_max_length=data_args.pad_to_max_length,
        keep_places=keep_places,
        with_answers=with_answers,
    )


def predict(trainer: MoaTrainer, features: Features, metric: AnswerMetric) -> None:
    """Write the answers by their question's id; and where the right ones are known, their scores."""
    answered, asked = num_answered(features.questions), len(features.questions)
    trainer.compute_metrics = metric if answered == asked else None
    if answered < asked:
        logger.info(f"No scores: {asked - answered:,} of {asked:,} test questions come without answers.")
    prediction = trainer.predict(features.dataset, metric_key_prefix="predict")
    trainer.log(prediction.metrics)  # from where the model's card takes them
    metrics = {**prediction.metrics, "predict_samples": len(features.questions)}
    write_metrics(trainer, "predict", metrics)
    if trainer.is_world_process_zero():
        answers = metric.answers(*prediction.predictions[:2])
        found = dict(zip(features.questions["id"], answers, strict=True))
        path = Path(trainer.args.output_dir, "predict_predictions.json")
        text = json.dumps(found, indent=4, ensure_ascii=False)
        path.write_text(text + "\n", encoding="utf-8")
        logger.info(f"Answers written to {path}.")


def check_arguments(training_args: MoaTrainingArguments) -> None:
    grouped = training_args.train_sampling_strategy == "group_by_length"
    if grouped and training_args.eval_strategy != "no":
        raise ValueError(
            "`train_sampling_strategy` group_by_length would change the order of what is evaluated on "
            f"while training (got `eval_strategy` {training_args.eval_strategy}). Leave one of them out."
        )


def main(args: list[str] | None = None) -> None:
    *arguments, adapter_args, teacher_args, split_args, training_args = parse_arguments(
        args,
        CheckpointArguments,
        DataTrainingArguments,
        GatingArguments,
        AdapterArguments,
        TeacherArguments,
        SplitArguments,
        MoaTrainingArguments,
    )
    model_args, data_args, gating_args = arguments
    split_args.check(adapter_args.adapter)
    set_up_logging(training_args, logger)
    check_arguments(training_args)
    checkpoint = find_checkpoint(training_args)

    # The model comes right after the seed, so that variants draw the same head.
    set_seed(training_args.seed)
    model = AutoModelForQuestionAnswering.from_pretrained(
        model_args.model_name_or_path, **model_args.model_kwargs()
    )
    model = convert(model, gating_args)
    tokenizer = load_tokenizer(model_args)
    set_padding(tokenizer, model)
    teacher = teacher_args.load(model, model_args)
    model = split_model(model, split_args)
    model = adapt(model, adapter_args, TaskType.QUESTION_ANS, training_args.output_dir)

    def prepare(split: str) -> Features:
        questions = load_questions(data_args, model_args, split)
        return make_features(
            data_args,
            questions,
            tokenizer,
            keep_places=split != "train",
            with_answers=split != "test" or num_answered(questions) == len(questions),
        )

    def metric_of(features: Features) -> AnswerMetric:
        return AnswerMetric(
            features,
            n_best_size=data_args.n_best_size,
            max_answer_length=data_args.max_answer_length,
        )

    training = validation = metric = test = None
    if training_args.do_train:
        training = prepare("train")
    if training_args.do_eval or gating_args.eval_budgets:
        validation = prepare("validation")
        metric = metric_of(validation)
    if training_args.do_predict:
        test = prepare("test")
    trainer = MoaTrainer(
        model=model,
        args=training_args,
        teacher=teacher,
        train_dataset=None if training is None else training.dataset,
        eval_dataset=None if validation is None else validation.dataset,
        compute_metrics=metric,
        processing_class=tokenizer,
        data_collator=default_data_collator
        if data_args.pad_to_max_length
        else DataCollatorWithPadding(tokenizer),
    )
    trainer.model_accepts_loss_kwargs = False  # the loss is a mean, transformers' own models' too
    if training is not None:
        train(trainer, checkpoint)
    # the metric wants the order of the windows
    trainer.args.train_sampling_strategy = "random"
    if training_args.do_eval:
        metrics = {**trainer.evaluate(), "eval_samples": len(validation.questions)}
        write_metrics(trainer, "eval", metrics)
    if gating_args.eval_budgets:
        evaluate_at_budgets(trainer, {"squad": validation.dataset})
    if test is not None:
        predict(trainer, test, metric_of(test))
    finish(
        trainer,
        finetuned_from=model_args.model_name_or_path,
        tasks="question-answering",
        **data_for_card(data_args.dataset_name),
    )


if __name__ == "__main__":
    main()
