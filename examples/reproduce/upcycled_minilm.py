"""One upcycled checkpoint at three budgets against the same model cut to fewer layers.

A pretrained sentence encoder of 6 layers (MiniLM) is upcycled to MAE and CCT and finetuned once per
task; its accuracy and its measured time at each budget stand beside those of three plain models: MiniLM
itself, and MiniLM cut to 3 and to 2 of its layers (as Sanh et al. 2019 initialise DistilBERT, without
their distillation), each finetuned by itself:

    python examples/reproduce/upcycled_minilm.py --model_name_or_path $MINILM --data_dir $GLUE \
        --models_dir runs/upcycled_minilm

Learning rates are chosen first, on SST-2 and with a seed that the report leaves out, but on the same
development set: its figures are a little too good, of all models alike. Times are measured in a phase of
their own, which wants a machine that does nothing else (`--phases latency`) and trains again the models
that `--models_dir` lacks. A run that was stopped goes on where it was. The report, once or while runs
are under way:

    python examples/reproduce/upcycled_minilm.py --report model_cards/upcycled_minilm
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from experiment import GLUE_DIR, Experiment, Phase
from figures import draw_line, panels, save
from runs import Results, Settings
from scripts import TRAINER_FLAGS, Flags, budget_argument, read_json, run_script
from summaries import (
    Point,
    above_line,
    at_budget,
    best_rate,
    by_seed,
    latest,
    time_and_machine,
    with_deviation,
)

from hf_moa.markdown import table

BUDGETS = (1.0, 0.5, 0.33)
SEEDS = (1, 2, 3)
TUNING_SEED = 0
BATCH_SIZES = (1, 32)  # of the latency
LATENCY_EXAMPLES = 64

# training examples and epochs
TASKS = {
    "sst2": {"max_train_samples": 20_000, "num_train_epochs": 3},
    "qnli": {"max_train_samples": 9_000, "num_train_epochs": 4},
    "mnli": {"max_train_samples": 9_000, "num_train_epochs": 4},
}
# name -> the layers that stay
CUT = {"6 layers": (0, 1, 2, 3, 4, 5), "3 layers": (0, 2, 4), "2 layers": (0, 3)}
GATED = "CCT + MAE"
MODELS = (*CUT, GATED)
TUNING_TASK = "sst2"
RATES = {**dict.fromkeys(CUT, (5e-5, 1e-4, 2e-4)), GATED: (1e-4, 2e-4, 4e-4)}
TRAINING: Flags = {
    **TRAINER_FLAGS,
    "bf16": True,
    "do_train": True,
    "do_eval": True,
    "pad_to_max_length": False,
    "warmup_steps": 0.1,
    "per_device_train_batch_size": 32,
    "per_device_eval_batch_size": 64,
    "train_sampling_strategy": "group_by_length",
}
GATES: Flags = {
    "attention_type": "mae",
    "mae_training": "joint",
    "cct_budgets": BUDGETS,
    "cct_noise_steps": -1,
    "cct_noise_max": 1,  # gates of a pretrained model start open; the paper's 5 closes many at random
    "eval_budgets": True,
}


def tuning_runs(results: Results) -> list[Settings]:
    return [
        {"task": TUNING_TASK, "model": model, "learning_rate": rate, "seed": TUNING_SEED}
        for model in MODELS
        for rate in RATES[model]
    ]


def final_runs(results: Results) -> list[Settings]:
    return [
        {
            "task": task,
            "model": model,
            "learning_rate": chosen_rate(results, model),
            "seed": seed,
        }
        for seed in SEEDS
        for task in TASKS
        for model in MODELS
    ]


def chosen_rate(results: Results, model: str) -> float:
    """That with the best accuracy of the tuning runs, of CCT's the mean over budgets."""
    return best_rate(results, "mean_accuracy", model=model, seed=TUNING_SEED)


def latency_runs(results: Results) -> list[Settings]:
    return [
        {"task": task, "latency_of_batch": size, "seed": SEEDS[0]}
        for task in TASKS
        for size in BATCH_SIZES
    ]


def finetune(settings: Settings, options: argparse.Namespace) -> dict:
    """One run of `examples/run_glue.py`. The models of the first seed are kept, to be timed."""
    if settings["seed"] == SEEDS[0]:
        folder = model_folder(options.models_dir, settings)
        return _finetune(settings, options, folder)
    with tempfile.TemporaryDirectory() as folder:
        return _finetune(settings, options, Path(folder))


def model_folder(models_dir: str, settings: Settings) -> Path:
    return Path(models_dir, settings["task"], settings["model"].replace(" ", ""))


def trained_model(task: str, model: str, options: argparse.Namespace) -> Path:
    """The folder of the first seed's model, which is trained again where it is gone."""
    results = Results(options.results)
    run = {
        "task": task,
        "model": model,
        "learning_rate": chosen_rate(results, model),
        "seed": SEEDS[0],
    }
    folder = model_folder(options.models_dir, run)
    if not (folder / "all_results.json").is_file():
        _finetune(run, options, folder)
    return folder


def _finetune(settings: Settings, options: argparse.Namespace, folder: Path) -> dict:
    task, model = settings["task"], settings["model"]
    flags = {
        **TRAINING,
        **TASKS[task],
        **(GATES if model == GATED else {}),
        **({} if options.data_dir is None else {"data_dir": options.data_dir}),
        "model_name_or_path": options.model_name_or_path,
        "task_name": task,
        "learning_rate": settings["learning_rate"],
        "seed": settings["seed"],
    }
    with tempfile.TemporaryDirectory() as cut:
        if model in CUT and CUT[model] != CUT["6 layers"]:
            keep_layers(options.model_name_or_path, CUT[model], cut)
            flags["model_name_or_path"] = cut
        measured = run_script("run_glue", flags, folder)
    return read_run(measured, folder, task)


def keep_layers(model_name_or_path: str, layers: tuple[int, ...], folder: str) -> None:
    """Write the checkpoint with only these of its layers to `folder`."""
    from torch import nn
    from transformers import AutoModel, AutoTokenizer

    model = AutoModel.from_pretrained(model_name_or_path)
    model.encoder.layer = nn.ModuleList(model.encoder.layer[i] for i in layers)
    model.config.num_hidden_layers = len(layers)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model_name_or_path).save_pretrained(folder)


def read_run(measured: dict[str, Any], folder: Path, task: str) -> dict[str, Any]:
    """Accuracy; with CCT, of each budget."""
    run = {
        "train_seconds": measured["train_runtime"],
        "parameters": measured["trainable_parameters"],
        "accuracy": measured["eval_accuracy"],
    }
    budgets = folder / f"budget_results_{task}.json"
    if budgets.is_file():
        for row in read_json(budgets):
            run[at_budget("accuracy", row["budget"])] = row["eval_accuracy"]
            run[at_budget("compute", row["budget"])] = row["compute_fraction"]
    accuracies = [value for name, value in run.items() if name.startswith("accuracy at")]
    run["mean_accuracy"] = sum(accuracies) / len(accuracies) if accuracies else run["accuracy"]
    return run


def measure_latency(settings: Settings, options: argparse.Namespace) -> dict[str, float]:
    """Milliseconds per example for the first development examples in batches, by model and budget."""
    import torch
    from transformers import AutoModelForSequenceClassification

    from hf_moa.timing import compare

    folders = {m: trained_model(settings["task"], m, options) for m in MODELS}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    batches = development_batches(settings, options, folders[GATED], device)
    candidates = {}
    for name, folder in folders.items():
        model = AutoModelForSequenceClassification.from_pretrained(folder).to(device).eval()
        for column, budget in columns(name).items():
            candidates[column] = partial(run_all, model, batches, budget_argument(budget))
    with torch.inference_mode():
        times = compare(candidates, turns=11, title="latency")
    return {time.name: time.value / LATENCY_EXAMPLES for time in times}


def columns(model: str) -> dict[str, float | None]:
    """What the report calls a model at each of its budgets -> the budget."""
    return {at_budget(model, budget): budget for budget in (BUDGETS if model == GATED else (None,))}


def run_all(model: Callable[..., Any], batches: list[dict], kwargs: dict[str, Any]) -> None:
    for batch in batches:
        model(**batch, **kwargs)


def development_batches(
    settings: Settings,
    options: argparse.Namespace,
    tokenizer: Path,
    device: str,
    *,
    train: int | None = None,
) -> list[dict]:
    """The first examples of the development set, in batches of the latency's size; or `train` of the
    training set, with labels."""
    import torch
    from datasets import load_dataset
    from transformers import AutoTokenizer

    from hf_moa.training import GLUE_TASKS, load_glue_tsv

    task, size = settings["task"], settings["latency_of_batch"]
    if options.data_dir is None:
        splits = load_dataset("nyu-mll/glue", task)
    else:
        splits = load_glue_tsv(options.data_dir, task)
    validation = "validation_matched" if task == "mnli" else "validation"
    rows = splits[validation][:LATENCY_EXAMPLES] if train is None else splits["train"][:train]
    texts = [rows[name] for name in GLUE_TASKS[task].text_columns]
    tokenize = partial(
        AutoTokenizer.from_pretrained(tokenizer), padding=True, truncation=True, max_length=128
    )
    return [
        dict(tokenize(*(t[i : i + size] for t in texts), return_tensors="pt").to(device))
        | ({} if train is None else {"labels": torch.tensor(rows["label"][i : i + size])})
        for i in range(0, len(texts[0]), size)
    ]


def report(results: Results, folder: Path) -> str:
    """Tables in Markdown; the figures are written to `folder`."""
    for size in BATCH_SIZES:
        draw(results, size, folder / f"accuracy_batch_{size}.svg")
    parts = []
    for task, size in TASKS.items():
        examples, epochs = size["max_train_samples"], size["num_train_epochs"]
        rates = ", ".join(f"{model} {chosen_rate(results, model):g}" for model in MODELS)
        parts += [
            f"### {task.upper()}: {examples:,} training examples, {epochs} epochs",
            task_table(results, task),
            table_against_plain(results, task),
            f"Learning rates: {rates}. {time_and_machine(results, task=task)}",
        ]
    return "\n\n".join(parts)


def task_table(results: Results, task: str) -> str:
    """Accuracy, share of the gated compute, and time, of each model and budget."""
    latency = {size: latest(results, task=task, latency_of_batch=size) for size in BATCH_SIZES}
    full = next(iter(CUT))
    rows = []
    for model in MODELS:
        rate = chosen_rate(results, model)
        for column, budget in columns(model).items():
            compute = computes(results, task, rate, budget)
            times = [
                f"{found[column]:.2f} ({found[full] / found[column]:.2f}x)" if found else "-"
                for found in latency.values()
            ]
            accuracy = accuracies(results, task, model, budget)
            compute = with_deviation(compute, "{:.2f}")
            rows.append([column, with_deviation(accuracy.values()), compute, *times])
    heads = [f"ms per example, batch {size} (speed-up)" for size in BATCH_SIZES]
    return table(["model", "accuracy", "compute fraction", *heads], rows)


def table_against_plain(results: Results, task: str) -> str:
    """How far the gated checkpoint is above what plain models give in the same time."""
    rows = []
    for column, budget in columns(GATED).items():
        apart = (above_plain(results, task, budget, size) for size in BATCH_SIZES)
        rows.append([column, *(with_deviation(values, sign=True) for values in apart)])
    heads = [f"points above the plain models' line, batch {size}" for size in BATCH_SIZES]
    return table(["model", *heads], rows)


def above_plain(results: Results, task: str, budget: float | None, size: int) -> list[float]:
    """Points of accuracy, seed by seed."""
    times = latest(results, task=task, latency_of_batch=size)
    if not times:
        return []

    def point(model: str, budget: float | None) -> Point:
        time = times[at_budget(model, budget)]
        return dict.fromkeys(SEEDS, time), accuracies(results, task, model, budget)

    return above_line(point(GATED, budget), (point(model, None) for model in CUT))


def accuracies(results: Results, task: str, model: str, budget: float | None) -> dict[int, float]:
    """In per cent, by seed, of those that the report shows."""
    rate, measure = chosen_rate(results, model), at_budget("accuracy", budget)
    found = by_seed(results, measure, task=task, model=model, learning_rate=rate)
    return {seed: 100 * value for seed, value in found.items() if seed in SEEDS}


def computes(results: Results, task: str, rate: float, budget: float | None) -> list[float]:
    if budget is None:
        return []
    measure = at_budget("compute", budget)
    found = by_seed(results, measure, task=task, model=GATED, learning_rate=rate)
    return [value for seed, value in found.items() if seed in SEEDS]


def draw(results: Results, size: int, path: Path) -> None:
    """Accuracy against time in batches of a size: the plain models, and one gated checkpoint."""
    figure, axes = panels(len(TASKS))
    for axis, task in zip(axes, TASKS, strict=True):
        found = latest(results, task=task, latency_of_batch=size)
        for style, (name, models) in enumerate(
            {"MiniLM of 6, 3 and 2 layers": tuple(CUT), f"one checkpoint, {GATED}": (GATED,)}.items(), 1
        ):
            points = [
                (found[column], list(accuracies(results, task, model, budget).values()))
                for model in models
                for column, budget in columns(model).items()
                if column in found
            ]
            draw_line(axis, points, style, label=name)
        axis.set_title(task.upper())
        axis.set_xlabel(f"ms per example, batches of {size}")
        axis.set_ylabel("development accuracy (%)")
    save(figure, axes, path)


EXPERIMENT = Experiment(
    name="upcycled_minilm",
    description=__doc__,
    phases=(
        Phase("rates", tuning_runs, finetune),
        Phase("training", final_runs, finetune),
        Phase("latency", latency_runs, measure_latency),
    ),
    report=report,
    needed={
        "model_name_or_path": "a pretrained BERT of 6 layers",
        "models_dir": "where the models of the first seed are kept, to be timed",
    },
    optional=GLUE_DIR,
    plan=lambda: [TRAINING, GATES, TASKS, CUT],
)

if __name__ == "__main__":
    EXPERIMENT.main()
