"""FTG and FTG+ against LoRA, full finetuning and the head alone, with 5 to 100 % of the training data.

Peng et al. 2020 (section 5.2, Figure 2) adapt a translation model to another domain through its gates.
Here a pretrained sentence encoder with MAE gates is adapted to two GLUE tasks:

    python examples/reproduce/adapters.py --model_name_or_path $MINILM --data_dir $GLUE

First, each method's learning rate is chosen among several, with a quarter of the data and a seed that
the report leaves out. A run that was stopped goes on where it was: finished runs are skipped. The
report, once or while runs are under way:

    python examples/reproduce/adapters.py --report model_cards/adapters
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from experiment import GLUE_DIR, Experiment, Phase
from figures import draw_line, panels, save
from runs import Results, Settings
from scripts import TRAINER_FLAGS, Flags, read_json, run_script
from summaries import best_rate, by_seed, differences, time_and_machine, with_deviation

from hf_moa.markdown import table

FRACTIONS = (0.05, 0.1, 0.25, 0.5, 0.75, 1.0)
SEEDS = (1, 2, 3)
TUNING = {"fraction": 0.25, "seed": 0}
EVALUATIONS = 8  # per run, at equal distances

# name -> what the report calls it, and the learning rates to choose from
METHODS = {
    "head": ("head alone (NOFT)", (1e-3, 3e-3, 1e-2, 3e-2)),
    "ftg": ("FTG", (1e-3, 3e-3, 1e-2)),
    "ftg+": ("FTG+", (3e-4, 1e-3, 3e-3)),
    "lora": ("LoRA", (3e-4, 1e-3, 3e-3)),
    "none": ("full finetuning", (2e-5, 5e-5, 1e-4, 2e-4)),
}
# training examples, batch size, epochs, and the least number of updates
TASKS = {
    "sst2": {"examples": 20_000, "batch": 32, "epochs": 2, "least_steps": 200},
    "mrpc": {"examples": 3_668, "batch": 16, "epochs": 3, "least_steps": 150},
}
TRAINING: Flags = {
    **TRAINER_FLAGS,
    "bf16": True,
    "pad_to_max_length": False,
    "attention_type": "mae",
    "mae_training": "joint",
    "do_train": True,
    "warmup_steps": 0.1,
    "per_device_eval_batch_size": 64,
    "train_sampling_strategy": "group_by_length",
    "eval_strategy": "steps",
}


def tuning_runs(results: Results) -> list[Settings]:
    return [
        {"task": task, "method": method, "learning_rate": rate, **TUNING}
        for task in TASKS
        for method, (_, rates) in METHODS.items()
        for rate in rates
    ]


def final_runs(results: Results) -> list[Settings]:
    rates = {(t, m): chosen_rate(results, t, m) for t in TASKS for m in METHODS}
    return [
        {
            "task": task,
            "method": method,
            "learning_rate": rates[task, method],
            "fraction": fraction,
            "seed": seed,
        }
        for seed in SEEDS
        for task in TASKS
        for fraction in FRACTIONS
        for method in METHODS
    ]


def chosen_rate(results: Results, task: str, method: str) -> float:
    """The learning rate with the best development accuracy of the tuning runs; NaN before the first."""
    return best_rate(results, "accuracy", task=task, method=method, **TUNING)


def training_plan(settings: Settings) -> dict[str, int]:
    """How many examples, updates, and updates between two evaluations."""
    task = TASKS[settings["task"]]
    examples = int(settings["fraction"] * task["examples"])
    steps = max(task["least_steps"], task["epochs"] * examples // task["batch"])
    every = -(-steps // EVALUATIONS)
    return {"examples": examples, "steps": every * EVALUATIONS, "every": every}


def measure(settings: Settings, options: argparse.Namespace) -> dict:
    """One finetuning run of `examples/run_glue.py`."""
    plan = training_plan(settings)
    flags = {
        **TRAINING,
        "model_name_or_path": options.model_name_or_path,
        "task_name": settings["task"],
        "adapter": settings["method"],
        "seed": settings["seed"],
        "max_train_samples": plan["examples"],
        "max_steps": plan["steps"],
        "learning_rate": settings["learning_rate"],
        "per_device_train_batch_size": TASKS[settings["task"]]["batch"],
        "eval_steps": plan["every"],
    }
    if options.data_dir is not None:
        flags |= {"data_dir": options.data_dir, "skip_malformed_rows": True}
    if settings["method"] != "none":
        flags["modules_to_save"] = "pooler"
    with tempfile.TemporaryDirectory() as folder:
        return read_run(run_script("run_glue", flags, folder), Path(folder))


def read_run(train: dict, folder: Path) -> dict:
    """The best evaluation of a run, its updates, and what it trained and stored."""
    state = read_json(folder / "trainer_state.json")
    curve = [(log["step"], log["eval_accuracy"]) for log in state["log_history"] if "eval_loss" in log]
    best = max(accuracy for _, accuracy in curve)
    stored = next(folder.glob("adapter_model.safetensors"), folder / "model.safetensors")
    return {
        "accuracy": best,
        "steps_to_best": next(step for step, accuracy in curve if accuracy == best),
        "curve": curve,
        "trainable_parameters": train["trainable_parameters"],
        "stored_bytes": stored.stat().st_size,
        "train_seconds": train["train_runtime"],
    }


def report(results: Results, folder: Path) -> str:
    """Tables in Markdown; the figure is written to `folder`."""
    parts = [sizes(results)]
    for task, plan in TASKS.items():
        parts.append(f"### {task.upper()}, {plan['examples']:,} examples are 100 %\n\nBest accuracy:")
        parts.append(by_fraction(results, task, accuracy))
        parts.append("Difference to full finetuning, seed by seed:")
        parts.append(by_fraction(results, task, above_full_finetuning, sign=True))
        parts.append("Updates to the best evaluation:")
        parts.append(by_fraction(results, task, steps_to_best, form="{:.0f}"))
    parts.append(time_and_machine(results))
    draw(results, folder / "accuracy.svg")
    return "\n\n".join(parts)


def sizes(results: Results) -> str:
    rows = []
    for method, (name, _) in METHODS.items():
        found = results.find(method=method)
        if found:
            measured = found[0]["measured"]
            stored = f"{measured['stored_bytes'] / 1e6:.1f} MB" if method != "head" else "-"
            rates = [f"{chosen_rate(results, task, method):g}" for task in TASKS]
            rows.append([name, f"{measured['trainable_parameters']:,}", stored, ", ".join(rates)])
    return table(
        ["method", "trainable parameters", "on disk", f"learning rate ({', '.join(TASKS)})"], rows
    )


def by_fraction(
    results: Results,
    task: str,
    measure: Callable[[Results, str, str, float], Iterable[float]],
    **form: Any,
) -> str:
    rows = [
        [name, *(with_deviation(measure(results, task, method, f), **form) for f in FRACTIONS)]
        for method, (name, _) in METHODS.items()
    ]
    return table(["method", *(f"{f:.0%}" for f in FRACTIONS)], rows)


def accuracy(results: Results, task: str, method: str, fraction: float) -> list[float]:
    """In per cent."""
    found = reported(results, "accuracy", task, method, fraction)
    return [100 * value for value in found.values()]


def above_full_finetuning(results: Results, task: str, method: str, fraction: float) -> list[float]:
    """By how many points, of each seed."""
    if method == "none":
        return []
    found, full = (reported(results, "accuracy", task, m, fraction) for m in (method, "none"))
    return [100 * value for value in differences(found, full)]


def steps_to_best(results: Results, task: str, method: str, fraction: float) -> list[float]:
    return list(reported(results, "steps_to_best", task, method, fraction).values())


def reported(
    results: Results, measure: str, task: str, method: str, fraction: float
) -> dict[int, float]:
    """What was measured with the chosen learning rate, by seed, of the seeds that the report shows."""
    rate = chosen_rate(results, task, method)
    found = by_seed(results, measure, task=task, method=method, fraction=fraction, learning_rate=rate)
    return {seed: value for seed, value in found.items() if seed in SEEDS}


def draw(results: Results, path: Path) -> None:
    """Accuracy against the share of the data, a line per method, in the form of the paper's Figure 2."""
    figure, axes = panels(len(TASKS))
    for axis, (task, plan) in zip(axes, TASKS.items(), strict=True):
        for style, (method, (name, _)) in enumerate(METHODS.items()):
            points = [(100 * f, accuracy(results, task, method, f)) for f in FRACTIONS]
            draw_line(axis, points, style, label=name)
        axis.set_title(f"{task.upper()} ({plan['examples']:,} examples)")
        axis.set_xlabel("share of the training data (%)")
        axis.set_ylabel("best development accuracy (%)")
    save(figure, axes, path)


EXPERIMENT = Experiment(
    name="adapters",
    description=__doc__,
    phases=(Phase("rates", tuning_runs, measure), Phase("fractions", final_runs, measure)),
    report=report,
    needed={"model_name_or_path": "a pretrained BERT"},
    optional=GLUE_DIR,
    plan=lambda: [TRAINING, TASKS, EVALUATIONS],
)

if __name__ == "__main__":
    EXPERIMENT.main()
