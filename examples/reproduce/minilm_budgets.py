"""One checkpoint with several speeds against models cut to fewer layers, all distilled alike.

A pretrained sentence encoder of 6 layers (MiniLM) is finetuned on a task. This plain model then teaches
its students, which start from its weights and train as long again: itself; its cuts to 3 and 2 layers;
one checkpoint with nested budgets, the smallest with fewer layers; and one with CCT. Both checkpoints
train every budget in each step:

    python examples/reproduce/minilm_budgets.py --model_name_or_path $MINILM --data_dir $GLUE \
        --models_dir runs/minilm_budgets

Every classifier is of this package, and computes its last layer for the first token only; times are of
eval, in a phase of their own that wants a machine that does nothing else (`--phases latency`). Models
train in bf16 autocast; `--precision float32` is faster on a processor without AVX-512, and each run says
which it had.
A run that was stopped goes on where it was. The report, once or while runs are under way:

    python examples/reproduce/minilm_budgets.py --report model_cards/minilm_budgets
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from against_cut import AgainstCut
from experiment import GLUE_DIR, PRECISION, Experiment, Phase
from figures import panels, save
from runs import Results, Settings
from scripts import TRAINER_FLAGS, Flags, claimed, precision_flag, read_json, run_script
from students import CCT, ITSELF, NESTED, PLAIN, candidates, write_student
from summaries import at_budget, time_and_machine

BUDGETS = (1.0, 0.5, 0.33, 0.2)
NESTED_LAYERS = (6, 6, 6, 4)
SEEDS = (1, 2, 3)
IMPORTANCE_EXAMPLES = 1024
BATCH_SIZES = (1, 32)  # of the latency
LATENCY_EXAMPLES = 64

# training examples and epochs
TASKS = {
    "sst2": {"max_train_samples": 20_000, "num_train_epochs": 3},
    "qnli": {"max_train_samples": 9_000, "num_train_epochs": 4},
    "mnli": {"max_train_samples": 9_000, "num_train_epochs": 4},
}
CUT = {"3 layers": (0, 2, 4), "2 layers": (0, 3)}  # the layers that stay
OF_MODELS = {NESTED: BUDGETS, CCT: BUDGETS}
MODELS = (PLAIN, ITSELF, *CUT, *OF_MODELS)
# the best of three for a model of as many layers, on SST-2 without distillation
RATES = {**dict.fromkeys(MODELS, 1e-4), "2 layers": 2e-4}
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
OF_BUDGETS: Flags = {"budget_sampling": "all", "eval_budgets": True}


def training_runs(results: Results) -> list[Settings]:
    return [
        {"task": task, "model": model, "learning_rate": RATES[model], "seed": seed}
        for seed in SEEDS
        for task in TASKS
        for model in MODELS
    ]


def latency_runs(results: Results) -> list[Settings]:
    return [
        {"task": task, "latency_of_batch": size, "seed": SEEDS[0]}
        for task in TASKS
        for size in BATCH_SIZES
    ]


def train(settings: Settings, options: argparse.Namespace) -> dict:
    """A run; its model is kept where it teaches, or its time depends on what it learned."""
    is_timed = settings["model"] == CCT and settings["seed"] == SEEDS[0]
    if settings["model"] == PLAIN or is_timed:
        measured = _train(settings, options, model_folder(settings, options))
    else:
        with tempfile.TemporaryDirectory() as folder:
            measured = _train(settings, options, Path(folder))
    return measured | {"precision": options.precision}


def model_folder(settings: Settings, options: argparse.Namespace) -> Path:
    name = settings["model"].replace(", ", "_").replace(" ", "")
    return Path(options.models_dir, settings["task"], f"{name}-{settings['seed']}")


def trained(settings: Settings, options: argparse.Namespace) -> Path:
    """The folder of a model, which is trained again where it is gone."""
    folder = model_folder(settings, options)
    with claimed(folder):
        if not (folder / "all_results.json").is_file():
            _train(settings, options, folder)
    return folder


def _train(settings: Settings, options: argparse.Namespace, folder: Path) -> dict:
    task, model = settings["task"], settings["model"]
    flags = {
        **TRAINING,
        **precision_flag(options.precision),
        **TASKS[task],
        **({} if options.data_dir is None else {"data_dir": options.data_dir}),
        "model_name_or_path": options.model_name_or_path,
        "task_name": task,
        "learning_rate": settings["learning_rate"],
        "seed": settings["seed"],
    }
    if model == PLAIN:
        return read_run(run_script("run_glue", flags, folder), folder, task)
    teacher = trained(settings | {"model": PLAIN, "learning_rate": RATES[PLAIN]}, options)
    with tempfile.TemporaryDirectory() as start:
        make_student(model, teacher, task, options, start)
        flags |= {"model_name_or_path": start, "teacher": teacher}
        if model in OF_MODELS:
            flags |= OF_BUDGETS
        return read_run(run_script("run_glue", flags, folder), folder, task)


def make_student(model: str, teacher: Path, task: str, options: argparse.Namespace, folder: str) -> None:
    """Write what a student starts from."""
    from transformers import AutoTokenizer, BertForSequenceClassification

    fields: dict[str, Any] = {
        NESTED: {"nested_budgets": list(BUDGETS), "nested_layers": list(NESTED_LAYERS)},
        CCT: {"cct_budgets": list(BUDGETS)},
    }.get(model, {})
    write_student(
        BertForSequenceClassification.from_pretrained(teacher),
        folder,
        layers=len(CUT[model]) if model in CUT else None,
        batches=lambda: training_batches(task, teacher, options),
        **fields,
    )
    AutoTokenizer.from_pretrained(teacher).save_pretrained(folder)


def read_run(measured: dict[str, Any], folder: Path, task: str) -> dict[str, Any]:
    """Accuracy; with budgets, of each."""
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
    return run


def training_batches(task: str, tokenizer: Path, options: argparse.Namespace) -> list[dict]:
    """Labelled ones, for the importance of heads and neurons."""
    of_size = {"task": task, "latency_of_batch": 32}
    return development_batches(of_size, options, tokenizer, "cpu", train=IMPORTANCE_EXAMPLES)


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


def measure_latency(settings: Settings, options: argparse.Namespace) -> dict[str, float]:
    """Milliseconds per example for the first development examples in batches, by model and budget."""
    import torch
    from transformers import AutoModelForSequenceClassification

    from hf_moa.timing import compare

    task = settings["task"]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    run = {"task": task, "seed": settings["seed"]}
    folders = {
        name: trained(run | {"model": name, "learning_rate": RATES[name]}, options)
        for name in (PLAIN, CCT)
    }
    batches = development_batches(settings, options, folders[PLAIN], device)

    def run_all(model: Any, chosen: dict) -> None:
        for batch in batches:
            model(**batch, **chosen)

    timed = candidates(
        MODELS,
        OF_MODELS,
        folders,
        lambda name, folder: make_student(name, folders[PLAIN], task, options, folder),
        AutoModelForSequenceClassification,
        run_all,
        device=device,
    )
    with torch.inference_mode():
        times = compare(timed, turns=11, title="latency")
    return {time.name: time.value / LATENCY_EXAMPLES for time in times}


def report(results: Results, folder: Path) -> str:
    """Tables in Markdown; the figures are written to `folder`."""
    parts = []
    tasks = [task for task in TASKS if results.find(task=task, model=PLAIN)]
    for size in BATCH_SIZES:
        timed = [task for task in tasks if runs_of(results, task).times(size)]
        if timed:
            figure, axes = panels(len(timed))
            for axis, task in zip(axes, timed, strict=True):
                runs_of(results, task).draw(axis, size)
                axis.set_title(task.upper())
                axis.set_ylabel("development accuracy (%)")
            save(figure, axes, folder / f"accuracy_batch_{size}.svg")
    for task in tasks:
        examples, epochs = TASKS[task]["max_train_samples"], TASKS[task]["num_train_epochs"]
        of_task = runs_of(results, task)
        parts += [
            f"### {task.upper()}: {examples:,} training examples, {epochs} epochs",
            of_task.table(),
        ]
        if any(of_task.times(size) for size in BATCH_SIZES):
            parts.append(of_task.table_against_cut())
        parts.append(time_and_machine(results, task=task))
    return "\n\n".join(parts)


def runs_of(results: Results, task: str) -> AgainstCut:
    return AgainstCut(
        results,
        {"task": task},
        measure="accuracy",
        name="accuracy",
        scale=100,
        full="6 layers",
        cut=tuple(CUT),
        budgets=OF_MODELS,
        batch_sizes=BATCH_SIZES,
        unit="ms per example",
    )


EXPERIMENT = Experiment(
    name="minilm_budgets",
    description=__doc__,
    phases=(
        Phase("training", training_runs, train),
        Phase("latency", latency_runs, measure_latency),
    ),
    report=report,
    needed={
        "model_name_or_path": "a pretrained BERT of 6 layers",
        "models_dir": "where plain models are kept, which teach, and CCT of the first seed, to be timed",
    },
    optional=GLUE_DIR | PRECISION,
    plan=lambda: [TRAINING, OF_BUDGETS, TASKS, CUT, NESTED_LAYERS, BUDGETS, IMPORTANCE_EXAMPLES],
)

if __name__ == "__main__":
    EXPERIMENT.main()
