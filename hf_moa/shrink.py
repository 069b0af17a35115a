"""A finetuned model becomes one checkpoint with several sizes: sort, distil, evaluate, time.

hf-moa shrink ./my-bert ./my-bert-sizes --train-file train.tsv --text-column sentence
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, Trainer
from transformers.trainer_utils import get_last_checkpoint

from hf_moa import importance, upcycle
from hf_moa.hub_names import check_source

from .benchmark import benchmark
from .environment import environment
from .markdown import table
from .relatives import source_kind
from .text_batches import TextBatches
from .training import MoaTrainer, MoaTrainingArguments, evaluate_budgets

if TYPE_CHECKING:
    from datasets import Dataset

_MARKER = "shrink.json"  # the settings: what a folder must have to go on with
_RESULTS = "results.json"
_WORK = "checkpoints"
_LENGTH = "characters"  # a column of the data
_TASKS = ("text-classification", "fill-mask", "text-generation", "text2text-generation")


@dataclass(frozen=True)
class ShrinkSettings:
    """How a model is shrunk.

    Args:
        budgets, layers: `nested_budgets` and `nested_layers`.
        epochs, learning_rate, batch_size, max_length, seed: of the training, every step of which runs at
            each budget; the source teaches. Batches are of texts of about the same length.
        bf16: whether training and evaluation compute in bfloat16 (autocast). Times are of float32.
        importance_examples: that tell what matters.
        held_out: share of the training data to evaluate on, where no other is given.
    """

    budgets: tuple[float, ...] = (1.0, 0.5, 0.33)
    layers: tuple[int, ...] | None = None
    epochs: float = 2.0
    learning_rate: float = 1e-4
    batch_size: int = 32
    max_length: int | None = None
    bf16: bool = False
    seed: int = 0
    importance_examples: int = 1024
    held_out: float = 0.1


def shrink(
    source: str,
    output_dir: str | Path,
    *,
    train: Dataset,
    validation: Dataset | None = None,
    settings: ShrinkSettings | None = None,
    overwrite: bool = False,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Make of a finetuned model one with nested budgets, and measure it.

    The heads and neurons of the source are sorted by importance, and every budget is distilled from the
    source, all in each step. `output_dir` gets the checkpoint with its tokenizer and card,
    `results.json`, and a picture of quality against time where matplotlib is installed. A run that was
    stopped goes on from its last epoch when it is started again.

    Args:
        source: folder or Hub id of a BERT, GPT-2 or T5 with a classifier or a language model's head.
        output_dir: folder to write.
        train, validation: examples as `hf_moa.text_batches.read_text` gives them; without a validation
            set a part of the training examples is held out.
        settings: default: `ShrinkSettings()`.
        overwrite: begin again where there is an earlier result.
        say: takes each line of progress.

    Returns:
        What `results.json` holds: a row of the source and of each budget, with quality and times.

    Raises:
        ValueError: a source with another head or without a tokenizer; data without labels; a folder
            that holds something else, an earlier result, or a run with other settings.

    Example:
        >>> shrink("./my-bert", "./my-bert-sizes", train=read_text("train.tsv"))
    """
    settings = ShrinkSettings() if settings is None else settings
    folder = Path(output_dir)
    check_source(source, "MODEL")
    _begin(folder, source, settings, overwrite=overwrite)
    if validation is None:
        parts = train.train_test_split(settings.held_out, seed=settings.seed)
        train, validation = parts["train"], parts["test"]
    plain, tokenizer = _load(source)
    train, validation = _with_lengths(train), _with_lengths(validation)
    model, examples = _sorted(plain, tokenizer, train, settings, say)
    trainer = _trainer(model, plain, examples, (train, validation), folder, settings)
    say(f"Training: {len(train)} examples, {settings.epochs:g} epochs, each step at every budget")
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(folder / _WORK)))
    say(f"Evaluation: {len(validation)} examples at every budget")
    rows = _measure(trainer, plain, TextBatches(validation, tokenizer, model, with_labels=True))
    trainer.save_model(str(folder))
    results = {
        "source": source,
        "settings": asdict(settings),
        "train": len(train),
        "validation": len(validation),
        "rows": rows,
        "environment": environment(),
    }
    say("\n" + format_sizes(rows))
    if draw_sizes(rows, folder / "sizes.png"):
        results["picture"] = "sizes.png"
    (folder / _RESULTS).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    shutil.rmtree(folder / _WORK, ignore_errors=True)
    return results


def _begin(folder: Path, source: str, settings: ShrinkSettings, *, overwrite: bool) -> None:
    """Make the folder, or find out that a run in it can go on."""
    facts = json.loads(json.dumps({"source": source, **asdict(settings)}))
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} must be a folder (got a file); give another path")
    held = folder / _MARKER
    if folder.is_dir() and any(folder.iterdir()) and not held.is_file():
        raise ValueError(f"{folder} holds something else than a run of shrink; give another folder")
    if held.is_file() and (folder / _RESULTS).is_file() and not overwrite:
        raise ValueError(f"{folder} holds a result already; give another folder, or --overwrite")
    if held.is_file():
        known = json.loads(held.read_text(encoding="utf-8"))
        differing = [name for name, value in facts.items() if known.get(name) != value]
        if differing and not overwrite:
            raise ValueError(
                f"{folder} holds a run with other {', '.join(differing)} (got "
                f"{[facts[name] for name in differing]}); give another folder, or --overwrite"
            )
        if overwrite:  # only what this command writes there
            shutil.rmtree(folder / _WORK, ignore_errors=True)
            (folder / _RESULTS).unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    held.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def _load(source: str) -> tuple[PreTrainedModel, Any]:
    config = AutoConfig.from_pretrained(source)
    kind = source_kind(config)
    name = next(iter(config.architectures or []), "").removeprefix("Moa")
    classes = {kind.tasks[task]: task for task in _TASKS if task in kind.tasks}
    if name not in classes:
        raise ValueError(
            f"{source} must be of a class with labels of its own to learn from: one of "
            f"{', '.join(classes)} (got {name or 'none in `architectures`'}). "
            "For others use MoaTrainer(teacher=...)."
        )
    plain = getattr(transformers, name).from_pretrained(source)
    try:
        return plain.eval(), AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise ValueError(f"{source} must have its tokenizer beside it (got {error}).") from error


def _with_lengths(data: Dataset) -> Dataset:
    """The data with their lengths in characters, by which `Trainer` groups them."""
    texts = [data[role] for role in ("text", "pair", "target") if role in data.column_names]
    lengths = [sum(len(str(each)) for each in row) for row in zip(*texts, strict=True)]
    return data.add_column(_LENGTH, lengths)


def _sorted(
    plain: PreTrainedModel,
    tokenizer: Any,
    train: Dataset,
    settings: ShrinkSettings,
    say: Callable[[str], None],
) -> tuple[PreTrainedModel, TextBatches]:
    fields: dict[str, Any] = {"nested_budgets": list(settings.budgets)}
    if settings.layers is not None:
        fields["nested_layers"] = list(settings.layers)
    unsorted = upcycle(plain, **fields)  # refuses the fields before the work

    def batches(data: Dataset) -> TextBatches:
        made = TextBatches(
            data, tokenizer, unsorted, with_labels=True, max_length=settings.max_length,
            batch_size=settings.batch_size, seed=settings.seed,
        )  # fmt: skip
        if not made.with_labels and not made.has_target:
            raise ValueError("the training data must have a column of labels (got none, or -1).")
        return made

    some = train.shuffle(seed=settings.seed).select(range(min(len(train), settings.importance_examples)))
    some = some.sort(_LENGTH)
    say(f"Importance: heads and neurons, on {len(some)} examples")
    from tqdm.auto import tqdm

    examples = batches(some)
    scores = importance(plain, tqdm(examples, desc="importance", total=len(examples)))
    return upcycle(plain, importance=scores, **fields), batches(train)


def _trainer(
    model: PreTrainedModel,
    plain: PreTrainedModel,
    examples: TextBatches,
    data: tuple[Dataset, Dataset],
    folder: Path,
    settings: ShrinkSettings,
) -> MoaTrainer:
    is_classifier = type(plain).__name__.endswith("ForSequenceClassification")
    return MoaTrainer(
        model,
        MoaTrainingArguments(
            str(folder / _WORK),
            num_train_epochs=settings.epochs,
            learning_rate=settings.learning_rate,
            warmup_steps=0.1,
            per_device_train_batch_size=settings.batch_size,
            per_device_eval_batch_size=2 * settings.batch_size,
            train_sampling_strategy="group_by_length",
            length_column_name=_LENGTH,
            bf16=settings.bf16,
            use_cpu=not torch.accelerator.is_available(),
            seed=settings.seed,
            budget_sampling="all",
            remove_unused_columns=False,
            prediction_loss_only=not is_classifier,
            save_strategy="epoch",
            save_total_limit=1,
            logging_strategy="epoch",
            report_to="none",
        ),
        train_dataset=data[0],
        eval_dataset=data[1],
        data_collator=examples.collate,
        processing_class=examples.tokenizer,
        compute_metrics=_quality if is_classifier else None,
        teacher=plain,
    )


def _quality(predictions: Any) -> dict[str, float]:
    """Accuracy; of a regression the correlation; of several labels the share that is right."""
    logits, labels = predictions.predictions, predictions.label_ids
    logits = logits[0] if isinstance(logits, tuple) else logits  # T5's, beside its encoder's states
    if logits.shape[-1] == 1:
        return {"correlation": float(np.corrcoef(logits[:, 0], labels)[0, 1])}
    if labels.ndim > 1:
        return {"accuracy": float(((logits > 0) == (labels > 0.5)).mean())}
    return {"accuracy": float((logits.argmax(-1) == labels).mean())}


def _measure(trainer: MoaTrainer, plain: PreTrainedModel, batches: TextBatches) -> list[dict[str, Any]]:
    """A row of the source and of each budget: quality, share of the matrices, milliseconds."""
    rows = evaluate_budgets(trainer)
    beside = Trainer(
        plain,
        trainer.args,
        eval_dataset=trainer.eval_dataset,
        data_collator=trainer.data_collator,
        compute_metrics=trainer.compute_metrics,
    )
    measured = beside.evaluate()
    kept = ("eval_loss", "eval_accuracy", "eval_correlation")
    source = {name: measured[name] for name in kept if name in measured}
    found: list[dict[str, Any]] = [{"budget": None, "compute_fraction": None, **source}]
    found += [{k: v for k, v in row.items() if k != "seconds"} for row in rows]
    # without autocast, which `Trainer` leaves in a model's forward
    model: Any = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
    for size in (1, 32):
        batches.batch_size = size
        batch = {name: x.to(model.device) for name, x in next(iter(batches)).items()}
        times = benchmark(model, batch)
        for row, time in zip(found, times, strict=True):
            row[f"milliseconds_batch_{size}"] = time["milliseconds"]
            row[f"ratio_batch_{size}"] = time["ratio"]
    for row in found:
        if "eval_accuracy" not in row and "eval_correlation" not in row:
            row["eval_perplexity"] = math.exp(min(row["eval_loss"], 700))
    return found


def quality_name(row: dict[str, Any]) -> str:
    """Which number of a row says how good it is."""
    names = ("accuracy", "correlation", "perplexity")
    return next(name for name in names if f"eval_{name}" in row)


def format_sizes(rows: list[dict[str, Any]]) -> str:
    """The rows as a table in Markdown."""
    name = quality_name(rows[0])
    lines = [
        [
            "source" if row["budget"] is None else f"{row['budget']:g}",
            f"{row[f'eval_{name}']:.4g}",
            "-" if row["compute_fraction"] is None else f"{row['compute_fraction']:.2f}",
            *(
                f"{row[f'milliseconds_batch_{size}']:.1f} ({1 / row[f'ratio_batch_{size}']:.2f}x)"
                for size in (1, 32)
            ),
        ]
        for row in rows
    ]
    return table(["budget", name, "share of the matrices", "ms, batch 1", "ms, batch 32"], lines)


def draw_sizes(rows: list[dict[str, Any]], path: Path) -> bool:
    """Quality against time in batches of 32; False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    name = quality_name(rows[0])
    figure = Figure(figsize=(4.6, 3.2), layout="constrained")
    axis = figure.subplots()
    source, *own = rows
    for points, style, label in (([source], "s", "source"), (own, "o-", "one checkpoint")):
        times = [row["milliseconds_batch_32"] for row in points]
        axis.plot(times, [row[f"eval_{name}"] for row in points], style, label=label)
    for row in own:
        axis.annotate(f"{row['budget']:g}", (row["milliseconds_batch_32"], row[f"eval_{name}"]))
    axis.set(xlabel="ms for a batch of 32", ylabel=name, xlim=(0, None))
    axis.legend()
    axis.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
    return True
