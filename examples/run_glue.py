"""Finetunes a model on a GLUE task, or on one's own texts with labels, with `MoaTrainer`: an ungated
baseline, or a checkpoint converted to mixture-of-heads attention (MAE, MoA) and conditional computation
(CCT).

The flags are those of transformers' own `run_glue.py` (except `--dataset_name`), plus
`GatingArguments`, `AdapterArguments` and `TeacherArguments`. Baseline, MAE, and CCT at three budgets,
from the same checkpoint and the same fresh classifier:

    python examples/run_glue.py --model_name_or_path google-bert/bert-base-uncased --task_name mrpc \
        --do_train --do_eval --learning_rate 2e-5 --output_dir out/bert
    python examples/run_glue.py ... --attention_type mae --output_dir out/mae
    python examples/run_glue.py ... --attention_type mha --cct_budgets 1 0.5 0.33 \
        --eval_budgets --output_dir out/cct

Of a gated model, only the gates (FTG), with the attention's output projections (FTG+), or LoRA of the
same size as the gates; the output is an adapter for PEFT:

    python examples/run_glue.py ... --attention_type mae --adapter ftg --output_dir out/ftg
    python examples/run_glue.py ... --attention_type mae --adapter lora --lora_match ftg \
        --output_dir out/lora

Budgets that learn from the finetuned model: all in each step, and the gates at a rate of their own:

    python examples/run_glue.py ... --model_name_or_path out/bert --teacher out/bert \
        --attention_type mha --cct_budgets 1 0.5 0.33 --budget_sampling all --gate_learning_rate 1e-3 \
        --eval_budgets --output_dir out/cct-taught

One's own data, CSV or JSON lines with a column `label` and one or two of text:

    python examples/run_glue.py ... --train_file train.csv --validation_file dev.csv \
        --do_train --do_eval --attention_type mae --output_dir out/mine

On a laptop, without the Hub, from a folder of GLUE's published TSV files:

    HF_HUB_OFFLINE=1 python examples/run_glue.py --model_name_or_path path/to/checkpoint \
        --task_name mrpc --data_dir glue_data --max_train_samples 200 --pad_to_max_length false \
        --do_train --do_eval --attention_type mae --output_dir out/mae-small

The arguments can stand in one JSON file instead: `python examples/run_glue.py arguments.json`.
"""

import logging
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from peft import TaskType
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    EvalPrediction,
    PreTrainedModel,
    Trainer,
    default_data_collator,
    set_seed,
)

from hf_moa.recipes.adapters import AdapterArguments, adapt
from hf_moa.recipes.command_line import optional, parse_arguments
from hf_moa.recipes.gating import GatingArguments, convert
from hf_moa.recipes.labelled_texts import LabelledFileArguments, load_labelled_files
from hf_moa.recipes.models import CheckpointArguments, load_tokenizer
from hf_moa.recipes.splitting import SplitArguments, split_model
from hf_moa.recipes.teachers import TeacherArguments
from hf_moa.recipes.tokenizers import set_padding
from hf_moa.recipes.trainer_runs import (
    evaluate_at_budgets,
    find_checkpoint,
    finish,
    set_up_logging,
    train,
    write_metrics,
)
from hf_moa.training import (
    GLUE_TASKS,
    GlueMetric,
    GlueTask,
    MoaTrainer,
    MoaTrainingArguments,
    load_glue_tsv,
)

logger = logging.getLogger(__name__)


@dataclass
class ModelArguments(CheckpointArguments):
    """Which checkpoint, config and tokenizer to start from."""

    config_name: str | None = optional("Path or name of the config, if not that of the model.")
    ignore_mismatched_sizes: bool = field(
        default=False,
        metadata={"help": "Draw a new classifier where the checkpoint's has another shape."},
    )


@dataclass
class DataTrainingArguments(LabelledFileArguments):
    """Which task to train and evaluate on, and how its texts are prepared."""

    task_name: str | None = optional(f"One of {', '.join(GLUE_TASKS)}.")
    data_dir: str | None = optional(
        "Folder of GLUE's published TSV files (CoLA/train.tsv, SST-2/dev.tsv.gz, ...). Default: "
        "the data set nyu-mll/glue of the Hub."
    )
    skip_malformed_rows: bool = field(
        default=False,
        metadata={"help": "With --data_dir, leave out malformed lines instead of stopping."},
    )
    max_seq_length: int = field(
        default=128, metadata={"help": "Longer texts are cut off at this number of tokens."}
    )
    pad_to_max_length: bool = field(
        default=True,
        metadata={"help": "Pad all texts to max_seq_length; false: to the longest of each batch."},
    )
    overwrite_cache: bool = field(
        default=False, metadata={"help": "Tokenize again what is in the cache already."}
    )
    max_train_samples: int | None = optional("Train on the first so many examples only.")
    max_eval_samples: int | None = optional("Evaluate on the first so many examples only.")
    max_predict_samples: int | None = optional("Predict the first so many test examples only.")

    def __post_init__(self):
        if (self.task_name is None) != bool(self.own_files):
            raise ValueError(
                "Give either `task_name`, one of GLUE's, or files of your own, `train_file` and "
                f"`validation_file` (got {self.task_name!r} and {list(self.own_files.values())})."
            )
        if self.task_name is None:
            if self.data_dir is not None:
                raise ValueError(f"`data_dir` needs `task_name`, one of GLUE's (got {self.data_dir!r}).")
            return
        self.task_name = self.task_name.lower()
        if self.task_name not in GLUE_TASKS:
            raise ValueError(
                f"`task_name` must be one of {', '.join(GLUE_TASKS)} (got {self.task_name!r})."
            )


def load_model(
    model_args: ModelArguments, gating_args: GatingArguments, task: GlueTask
) -> PreTrainedModel:
    """The classifier to train.

    Under one seed, all variants have the same encoder and the same newly drawn classifier: the
    ungated model is loaded first, and only then converted.
    """
    config = AutoConfig.from_pretrained(
        model_args.config_name or model_args.model_name_or_path,
        num_labels=task.num_labels,
        **model_args.hub_kwargs(),
    )
    model = AutoModelForSequenceClassification.from_pretrained(
        model_args.model_name_or_path,
        config=config,
        ignore_mismatched_sizes=model_args.ignore_mismatched_sizes,
        **model_args.model_kwargs(),
    )
    if not task.is_regression and label_order(model, task) is None:
        model.config.id2label = dict(enumerate(task.label_names))
        model.config.label2id = {name: i for i, name in enumerate(task.label_names)}
    return convert(model, gating_args)


def label_order(model: PreTrainedModel, task: GlueTask) -> list[int] | None:
    """The model's class id for each class of the task, or None if its classes have other names.

    A checkpoint that was trained on the task elsewhere may number the classes differently.
    """
    ids = {str(name).lower(): i for name, i in model.config.label2id.items()}
    if sorted(ids) != sorted(name.lower() for name in task.label_names):
        return None
    return [ids[name.lower()] for name in task.label_names]


def load_raw_datasets(
    model_args: ModelArguments, data_args: DataTrainingArguments
) -> tuple[dict, GlueTask]:
    """The splits, and what they are."""
    if data_args.own_files:
        name = model_args.config_name or model_args.model_name_or_path
        config = AutoConfig.from_pretrained(name, **model_args.hub_kwargs())
        return load_labelled_files(data_args.own_files, config)
    return load_glue(model_args, data_args), GLUE_TASKS[data_args.task_name]


def load_glue(model_args: ModelArguments, data_args: DataTrainingArguments) -> dict:
    if data_args.data_dir is not None:
        return load_glue_tsv(
            data_args.data_dir, data_args.task_name, skip_malformed=data_args.skip_malformed_rows
        )
    return model_args.load_dataset("nyu-mll/glue", data_args.task_name)


def tokenize(dataset, tokenizer, data_args: DataTrainingArguments, task: GlueTask, label_ids):
    """Adds the model's inputs; `label_ids[i]` is the model's id of the task's class i."""

    def tokenize_batch(examples):
        features = tokenizer(
            *(examples[name] for name in task.text_columns),
            padding="max_length" if data_args.pad_to_max_length else False,
            max_length=min(data_args.max_seq_length, tokenizer.model_max_length),
            truncation=True,
        )
        if label_ids is not None:
            features["label"] = [-1 if i == -1 else label_ids[i] for i in examples["label"]]
        return features

    return dataset.map(
        tokenize_batch,
        batched=True,
        load_from_cache_file=not data_args.overwrite_cache,
        desc="Tokenizing",
    )


def make_compute_metrics(task_name: str | None, label_ids: list[int] | None):
    # of one's own data: accuracy, or correlations
    metric = GlueMetric(task_name or ("stsb" if label_ids is None else "sst2"))

    def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
        logits, labels = first(prediction.predictions), prediction.label_ids
        if label_ids is None:
            result = metric.compute(predictions=logits[:, 0], references=labels)
        else:
            # Back to the task's numbering: F1 is that of the task's class 1.
            task_ids = np.argsort(label_ids)
            result = metric.compute(
                predictions=task_ids[logits.argmax(axis=1)], references=task_ids[labels]
            )
        if len(result) > 1:
            result["combined_score"] = float(np.mean(list(result.values())))
        return result

    return compute_metrics


def first(predictions):
    """The logits: models may return more, such as hidden states."""
    return predictions[0] if isinstance(predictions, tuple) else predictions


def select_split(raw_datasets, split: str, max_samples: int | None):
    if split not in raw_datasets:
        raise ValueError(f"The data must have the split {split!r} (got {', '.join(raw_datasets)}).")
    dataset = raw_datasets[split]
    return dataset if max_samples is None else dataset.select(range(min(max_samples, len(dataset))))


def split_names(task_name: str | None, split: str, available: Collection[str]) -> dict[str, str]:
    """Name for the results -> name of the split. MNLI has two sets to evaluate on, if both are there."""
    if task_name != "mnli" or split == "train":
        return {task_name or "texts": split}
    names = {"mnli": f"{split}_matched", "mnli-mm": f"{split}_mismatched"}
    if names["mnli"] in available and names["mnli-mm"] not in available:
        logger.warning(f"The data have no {names['mnli-mm']}: only {names['mnli']} is used.")
        del names["mnli-mm"]
    return names


def evaluate(trainer: Trainer, eval_sets: dict) -> None:
    metrics = {}
    for name, dataset in eval_sets.items():
        is_second = name == "mnli-mm"
        # a name of its own in the log, from which the model's card takes its metrics
        prefix = "eval_mm" if is_second else "eval"
        found = trainer.evaluate(dataset, metric_key_prefix=prefix) | {f"{prefix}_samples": len(dataset)}
        if is_second:  # in the files those of transformers' script
            own = [key for key in found if key.startswith("eval_mm_")]
            found = {f"eval_{key.removeprefix('eval_mm_')}_mm": found[key] for key in own}
        metrics.update(found)
    write_metrics(trainer, "eval", metrics)


def predict(trainer: Trainer, predict_sets: dict, task: GlueTask) -> None:
    for name, dataset in predict_sets.items():
        # The test labels are placeholders, and no loss is defined for them.
        logits = first(trainer.predict(dataset.remove_columns("label")).predictions)
        if task.is_regression:
            answers = [f"{score:.3f}" for score in logits[:, 0]]
        else:
            answers = [trainer.model.config.id2label[i] for i in logits.argmax(axis=1).tolist()]
        if trainer.is_world_process_zero():
            places = dataset["idx"]  # examples may have been left out
            lines = ["index\tprediction", *map("{}\t{}".format, places, answers)]
            path = Path(trainer.args.output_dir, f"predict_results_{name}.txt")
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
            logger.info(f"Predictions written to {path}.")


def main(args: list[str] | None = None) -> None:
    *arguments, adapter_args, teacher_args, split_args, training_args = parse_arguments(
        args,
        ModelArguments,
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
    with training_args.main_process_first(desc="reading the data"):
        raw_datasets, task = load_raw_datasets(model_args, data_args)
    checkpoint = find_checkpoint(training_args)

    # The model comes right after the seed, so that the variants draw the same classifier.
    set_seed(training_args.seed)
    model = load_model(model_args, gating_args, task)
    tokenizer = load_tokenizer(model_args)
    set_padding(tokenizer, model)
    teacher = teacher_args.load(model, model_args)
    model = split_model(model, split_args)
    model = adapt(model, adapter_args, TaskType.SEQ_CLS, training_args.output_dir)
    label_ids = None if task.is_regression else label_order(model, task)

    if data_args.max_seq_length > tokenizer.model_max_length:
        logger.warning(
            f"max_seq_length {data_args.max_seq_length} is more than the model takes; "
            f"{tokenizer.model_max_length} is used."
        )

    def prepare(split: str, max_samples: int | None) -> dict:
        return {
            name: tokenize(
                select_split(raw_datasets, part, max_samples), tokenizer, data_args, task, label_ids
            )
            for name, part in split_names(data_args.task_name, split, raw_datasets).items()
        }

    train_sets = eval_sets = predict_sets = {}
    with training_args.main_process_first(desc="preparing the data"):
        if training_args.do_train:
            train_sets = prepare("train", data_args.max_train_samples)
        if training_args.do_eval or gating_args.eval_budgets:
            eval_sets = prepare("validation", data_args.max_eval_samples)
        if training_args.do_predict:
            predict_sets = prepare("test", data_args.max_predict_samples)

    if data_args.pad_to_max_length:
        collator = default_data_collator
    else:
        # Tensor cores want lengths that are multiples of 8.
        half = training_args.fp16 or training_args.bf16
        collator = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8 if half else None)

    trainer = MoaTrainer(
        model=model,
        args=training_args,
        teacher=teacher,
        train_dataset=next(iter(train_sets.values()), None),
        eval_dataset=next(iter(eval_sets.values()), None),
        compute_metrics=make_compute_metrics(data_args.task_name, label_ids),
        processing_class=tokenizer,
        data_collator=collator,
    )
    trainer.model_accepts_loss_kwargs = False  # the loss is a mean, transformers' own models' too
    if training_args.do_train:
        train(trainer, checkpoint)
    # by length, predictions would be in another order than the examples
    trainer.args.train_sampling_strategy = "random"
    if training_args.do_eval:
        evaluate(trainer, eval_sets)
    if gating_args.eval_budgets:
        evaluate_at_budgets(trainer, eval_sets)
    if training_args.do_predict:
        predict(trainer, predict_sets, task)
    glue = {
        "language": "en",
        "dataset": f"GLUE {str(data_args.task_name).upper()}",
        "dataset_tags": "nyu-mll/glue",
        "dataset_args": data_args.task_name,
    }
    finish(
        trainer,
        finetuned_from=model_args.model_name_or_path,
        tasks="text-classification",
        **({} if data_args.own_files else glue),
    )


if __name__ == "__main__":
    main()
