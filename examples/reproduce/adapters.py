"""FTG and FTG+ against LoRA, full finetuning and the head alone, with 5 to 100 % of the training data.

Peng et al. 2020 (section 5.2, Figure 2) adapt a translation model to another domain through its gates.
Here a pretrained sentence encoder with MAE gates is adapted to two GLUE tasks:

    python examples/reproduce/adapters.py --model_name_or_path $MINILM --data_dir $GLUE

First, each method's learning rate is chosen among several, with a quarter of the data and a seed that
the report leaves out. A run that was stopped goes on where it was: finished runs are skipped. The
report, once or while runs are under way:

    python examples/reproduce/adapters.py --report model_cards/adapters
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch
from runs import Results, Settings, carry_out, markdown_table, mean_and_deviation

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "adapters.jsonl"

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


def tuning_runs() -> list[Settings]:
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
    rows = results.find(task=task, method=method, **TUNING)
    best = max(rows, key=lambda row: row["measured"]["accuracy"], default=None)
    return float("nan") if best is None else best["settings"]["learning_rate"]


def training_plan(settings: Settings) -> dict[str, int]:
    """How many examples, updates, and updates between two evaluations."""
    task = TASKS[settings["task"]]
    examples = int(settings["fraction"] * task["examples"])
    steps = max(task["least_steps"], task["epochs"] * examples // task["batch"])
    every = -(-steps // EVALUATIONS)
    return {"examples": examples, "steps": every * EVALUATIONS, "every": every}


def measure(settings: Settings, model: str, data_dir: str) -> dict:
    """One finetuning run of `examples/run_glue.py`."""
    import run_glue

    plan = training_plan(settings)
    with tempfile.TemporaryDirectory() as folder:
        flags = {
            "model_name_or_path": model,
            "data_dir": data_dir,
            "task_name": settings["task"],
            "skip_malformed_rows": True,
            "pad_to_max_length": False,
            "attention_type": "mae",
            "mae_training": "joint",
            "adapter": settings["method"],
            "seed": settings["seed"],
            "do_train": True,
            "max_train_samples": plan["examples"],
            "max_steps": plan["steps"],
            "learning_rate": settings["learning_rate"],
            "warmup_steps": 0.1,
            "per_device_train_batch_size": TASKS[settings["task"]]["batch"],
            "per_device_eval_batch_size": 64,
            "train_sampling_strategy": "group_by_length",
            "eval_strategy": "steps",
            "eval_steps": plan["every"],
            "save_strategy": "no",
            "bf16": True,
            "use_cpu": not torch.cuda.is_available(),
            "log_level": "error",
            "disable_tqdm": True,
            "report_to": "none",
            "output_dir": folder,
        }
        argv = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
        if settings["method"] != "none":
            argv += ["--modules_to_save", "pooler"]
        run_glue.main(argv)
        return read_run(Path(folder))


def read_run(folder: Path) -> dict:
    """The best evaluation of a run, its updates, and what it trained and stored."""
    state = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
    train = json.loads((folder / "train_results.json").read_text(encoding="utf-8"))
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
        parts.append(table(results, task, "accuracy", 100, "{:.1f} ± {:.1f}"))
        parts.append("Updates to the best evaluation:")
        parts.append(table(results, task, "steps_to_best", 1, "{:.0f}"))
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
    return markdown_table(
        ["method", "trainable parameters", "on disk", f"learning rate ({', '.join(TASKS)})"], rows
    )


def table(results: Results, task: str, measure: str, scale: float, form: str) -> str:
    rows = []
    for method, (name, _) in METHODS.items():
        cells = []
        for fraction in FRACTIONS:
            values = reported(results, task, method, fraction, measure)
            cells.append(
                form.format(*(scale * x for x in mean_and_deviation(values))) if values else "-"
            )
        rows.append([name, *cells])
    return markdown_table(["method", *(f"{f:.0%}" for f in FRACTIONS)], rows)


def reported(results: Results, task: str, method: str, fraction: float, measure: str) -> list[float]:
    rate = chosen_rate(results, task, method)
    rows = results.find(task=task, method=method, fraction=fraction, learning_rate=rate)
    return [row["measured"][measure] for row in rows if row["settings"]["seed"] in SEEDS]


def draw(results: Results, path: Path) -> None:
    """Accuracy against the share of the data, a line per method, in the form of the paper's Figure 2."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    size = (4.6 * len(TASKS), 3.6)
    figure, axes = pyplot.subplots(1, len(TASKS), figsize=size, layout="constrained", squeeze=False)
    # Okabe and Ito's colours, and markers, for print and for the colour-blind
    styles = zip(("#666666", "#0072B2", "#009E73", "#E69F00", "#D55E00"), "xosD^", strict=True)
    styles = dict(zip(METHODS, styles, strict=False))
    for axis, (task, plan) in zip(axes[0], TASKS.items(), strict=True):
        for method, (name, _) in METHODS.items():
            values = {f: reported(results, task, method, f, "accuracy") for f in FRACTIONS}
            points = [(100 * f, *mean_and_deviation(v)) for f, v in values.items() if v]
            if points:
                colour, marker = styles[method]
                x, mean, deviation = zip(*points, strict=True)
                axis.errorbar(
                    x,
                    [100 * value for value in mean],
                    yerr=[100 * value for value in deviation],
                    label=name,
                    color=colour,
                    marker=marker,
                    markersize=5,
                    capsize=2,
                    linewidth=1.4,
                )
        axis.set_title(f"{task.upper()} ({plan['examples']:,} examples)")
        axis.set_xlabel("share of the training data (%)")
        axis.set_ylabel("best development accuracy (%)")
        axis.grid(alpha=0.3)
    if axes[0, 0].lines:
        axes[0, 0].legend(frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model_name_or_path", help="a pretrained BERT")
    parser.add_argument("--data_dir", help="folder of GLUE's published TSV files")
    parser.add_argument("--results", type=Path, default=RESULTS, help="default: %(default)s")
    parser.add_argument("--report", type=Path, metavar="FOLDER", help="print tables, write the figure")
    options = parser.parse_args(arguments)

    results = Results(options.results)
    if options.report is not None:
        print(report(results, options.report))
        return
    if options.model_name_or_path is None or options.data_dir is None:
        parser.error("--model_name_or_path and --data_dir are needed to train; or give --report")
    sys.path.insert(0, str(HERE.parent))

    def one(settings: Settings) -> dict:
        return measure(settings, options.model_name_or_path, options.data_dir)

    carry_out(tuning_runs(), results, one, "learning rates")
    carry_out(final_runs(results), results, one, "adapters")


if __name__ == "__main__":
    main()
