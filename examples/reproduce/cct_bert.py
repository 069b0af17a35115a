"""CCT in BERT: quality against computation, in pretraining and finetuning. Bapna et al. 2020, section 5.

    python examples/reproduce/cct_bert.py --data_dir data --models_dir runs/cct_bert

One gated model (CCT) is pretrained on WikiText-2 and finetuned on SST-2, CoLA, MNLI and SQuAD, each time
for all budgets at once: 1, 0.5, 0.33 and 0.2. Beside it stand plain models with fewer layers, whose
computation is about that share, each pretrained and finetuned by itself. All are pretrained in two
stages, between which the largest plain model gets the gates (`hf_moa.upcycle`); in pretraining, one
with gates from the start, and the paper's extra norms, is added. Perplexity of masked tokens,
development scores of the tasks, what was computed (of the part that gates can skip, and in all, control
networks included), and in a phase of its own, which wants a machine that does nothing else, the time of
a forward pass (`--phases latency`).

The folder has GLUE's published files in `glue` and SQuAD's in `squad` (`corpora.py`). A run that was
stopped goes on where it was. The report:

    python examples/reproduce/cct_bert.py --report model_cards/cct_bert
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path

from corpora import find_file, read_lines, wikitext
from experiment import DATA_DIR, Experiment, Phase
from figures import draw_line, panels, save
from gate_measures import computed_at, layer_flops
from runs import Results, Settings, each_seed
from scripts import TRAINER_FLAGS, Flags, budget_argument, merged, read_json, run_folder, run_script
from summaries import (
    above_line,
    at_budget,
    by_seed,
    differences,
    latest,
    mean_and_deviation,
    time_and_machine,
    with_deviation,
)
from upcycling import MEAN_LOSS, PAPERS_CCT, write_upcycled
from wikitext_runs import SMALL_BERT, train_on_wikitext

from hf_moa.cli.command import load_checkpoint
from hf_moa.markdown import table

SEEDS = (1, 2, 3)
CORPUS = "wikitext-2"
PLAIN_STEPS, GATED_STEPS = 4_500, 4_500  # of pretraining, before and after the largest gets its gates
BUDGETS = (1.0, 0.5, 0.33, 0.2)
LENGTH = 64
LATENCY_BATCH = 32

PLAIN: dict[str, Flags] = {
    "plain, 6 layers": {"config_overrides": {"num_hidden_layers": 6}},
    "plain, 3 layers": {"config_overrides": {"num_hidden_layers": 3}},
    "plain, 2 layers": {"config_overrides": {"num_hidden_layers": 2}},
    # a wider feed-forward layer makes it a fifth
    "plain, 1 layer": {"config_overrides": {"num_hidden_layers": 1, "intermediate_size": 640}},
}
LARGEST = next(iter(PLAIN))
CCT, FROM_SCRATCH = "CCT", "CCT from scratch"
SAMPLED = (1, 1, *BUDGETS)  # the paper's 1 stands for half of the draws
GATES = {
    "cct_gate_hidden_size": 16,  # an eighth of d, or the gates cost what they save
    "cct_noise_max": 2.0,
}
NOISE: Flags = {"cct_noise_steps": -1}  # it grows over all of a run
FINETUNED = (*PLAIN, CCT)
VARIANTS = (*FINETUNED, FROM_SCRATCH)
PRETRAINING: Flags = merged(
    SMALL_BERT,
    {
        "attention_type": "mha",
        "config_overrides": {
            "max_position_embeddings": LENGTH,
            "sparse_prediction": True,
        },
        "max_seq_length": LENGTH,
        "learning_rate": 2e-3,
        "per_device_train_batch_size": 32,
        "mixed_precision": "no",  # bf16 takes twice as long on a CPU without units for it
    },
)
# task -> its measure, and flags
TASKS: dict[str, tuple[str, Flags]] = {
    "sst2": ("accuracy", {"max_train_samples": 10_000, "num_train_epochs": 3}),
    "cola": ("matthews_correlation", {"num_train_epochs": 4}),
    "mnli": ("accuracy", {"max_train_samples": 9_000, "num_train_epochs": 4}),
    "squad": (
        "f1",
        {
            "max_train_samples": 5_000,
            "num_train_epochs": 2,
            "doc_stride": LENGTH // 8,  # the longest questions leave no room for more
            "max_eval_samples": 2_000,
        },
    ),
}
PARTS = (None, *TASKS)  # of the report; None is pretraining
FINETUNING: Flags = {
    **TRAINER_FLAGS,
    "do_train": True,
    "do_eval": True,
    "max_seq_length": LENGTH,
    "pad_to_max_length": False,
    "learning_rate": 5e-4,
    "warmup_steps": 0.1,
    "per_device_train_batch_size": 32,
    "per_device_eval_batch_size": 64,
    "train_sampling_strategy": "group_by_length",
}


def pretraining_runs(results: Results) -> list[Settings]:
    return each_seed(SEEDS, VARIANTS, all_steps())


def finetuning_runs(results: Results) -> list[Settings]:
    runs = each_seed(SEEDS, FINETUNED, all_steps())
    return [{**run, "task": task} for run in runs for task in TASKS]


def all_steps() -> int:
    return PLAIN_STEPS + GATED_STEPS


def latency_runs(results: Results) -> list[Settings]:
    return [{"latency_of_batch": LATENCY_BATCH, "seed": SEEDS[0]}]


def budgets_of(variant: str) -> tuple[float | None, ...]:
    return (None,) if variant in PLAIN else BUDGETS


def pretrain(settings: Settings, options: argparse.Namespace) -> dict:
    """Two runs of `examples/run_mlm_no_trainer.py`, the second of which goes on from the first; one
    where the gates are there from the start."""
    variant = settings["variant"]
    found, folder = pretrained(variant, settings["seed"], options)
    model = load_checkpoint(str(folder)).base_model
    if variant in PLAIN:
        return {"perplexity": found["perplexity"], "flops": layer_flops(model, LENGTH)}
    measured = {}
    for budget in BUDGETS:
        perplexity, compute = (
            found[at_budget(name, budget).replace(" ", "_")]
            for name in ("perplexity", "compute_fraction")
        )
        measured[at_budget("perplexity", budget)] = perplexity
        measured |= computed_at(model, LENGTH, budget=budget, compute=compute)
    return measured


def pretrained(variant: str, seed: int, options: argparse.Namespace) -> tuple[dict, Path]:
    """What was measured of a model, and its folder; it is pretrained if it is not there."""
    train = partial(
        train_on_wikitext,
        "run_mlm_no_trainer",
        CORPUS,
        seed=seed,
        data_dir=options.data_dir,
        work_dir=options.models_dir,
    )
    folder = run_folder(options.models_dir, variant, seed)
    if variant == FROM_SCRATCH:
        gates = {"cct_budgets": SAMPLED, "config_overrides": GATES | MEAN_LOSS, **NOISE}
        flags = merged(merged(PRETRAINING, PLAIN[LARGEST]), gates)
        return train(flags, steps=all_steps(), folder=folder), folder
    plain = variant if variant in PLAIN else LARGEST
    start = run_folder(Path(options.models_dir, "first"), plain, seed)
    train(merged(PRETRAINING, PLAIN[plain]), steps=PLAIN_STEPS, folder=start)
    further = PRETRAINING
    if variant == CCT:
        gated = run_folder(Path(options.models_dir, "converted"), variant, seed)
        write_upcycled(start, gated, seed=seed, cct_budgets=list(SAMPLED), **GATES, **PAPERS_CCT)
        start, further = gated, PRETRAINING | NOISE
    return train(further, steps=GATED_STEPS, folder=folder, start=start), folder


def finetune(settings: Settings, options: argparse.Namespace) -> dict:
    """One run of `examples/run_glue.py` or `examples/run_qa.py`."""
    task = settings["task"]
    measure, flags = TASKS[task]
    flags = {
        **FINETUNING,
        **flags,
        "model_name_or_path": pretrained(settings["variant"], settings["seed"], options)[1],
        "seed": settings["seed"],
    }
    flags |= data_of(task, options.data_dir)
    if settings["variant"] == CCT:
        flags |= {**NOISE, "eval_budgets": True}
    with tempfile.TemporaryDirectory() as folder:
        found = run_script("run_qa" if task == "squad" else "run_glue", flags, folder)
        model = load_checkpoint(folder).base_model
        if settings["variant"] in PLAIN:
            return {"score": found[f"eval_{measure}"], "flops": layer_flops(model, LENGTH)}
        measured = {}
        for row in read_json(Path(folder, f"budget_results_{task}.json")):
            budget, compute = row["budget"], row["compute_fraction"]
            measured[at_budget("score", budget)] = row[f"eval_{measure}"]
            measured |= computed_at(model, LENGTH, budget=budget, compute=compute)
        return measured


def data_of(task: str, data_dir: str | None) -> Flags:
    """Flags for the data of a task; without a folder, of the Hub."""
    if task != "squad":
        return {"task_name": task, **({} if data_dir is None else {"data_dir": Path(data_dir, "glue")})}
    if data_dir is None:
        return {"dataset_name": "rajpurkar/squad"}
    folder = Path(data_dir, "squad")
    return {
        "train_file": find_file(folder, "train-v1.1.json"),
        "validation_file": find_file(folder, "dev-v1.1.json"),
    }


def measure_latency(settings: Settings, options: argparse.Namespace) -> dict[str, float]:
    """Milliseconds of a pretrained model's forward pass over the test text, by variant and budget."""
    import torch
    from transformers import AutoTokenizer

    from hf_moa.timing import compare

    text = " ".join(read_lines(wikitext(CORPUS, options.data_dir, options.models_dir)["test"]))
    size = 16 * LENGTH  # characters, which are more than `LENGTH` tokens, to be cut to these
    rows = [text[i * size : (i + 1) * size] for i in range(settings["latency_of_batch"])]
    candidates = {}
    for variant in FINETUNED:
        _, folder = pretrained(variant, settings["seed"], options)
        model = load_checkpoint(str(folder)).base_model
        batch = AutoTokenizer.from_pretrained(folder)(
            rows, padding=True, truncation=True, max_length=LENGTH, return_tensors="pt"
        )
        for budget in budgets_of(variant):
            call = partial(model, **batch, **budget_argument(budget))
            candidates[at_budget(variant, budget)] = call
    with torch.inference_mode():
        times = compare(candidates, turns=11, title="latency")
    return {time.name: time.value for time in times}


def report(results: Results, folder: Path) -> str:
    """Tables in Markdown; the figure is written to `folder`."""
    draw(results, folder / "quality.svg")
    parts = []
    for task in PARTS:
        parts += [
            f"### {title_of(task)}",
            quality_table(results, task),
            time_and_machine(results, steps=all_steps(), task=task),
        ]
    return "\n\n".join(parts)


def title_of(task: str | None) -> str:
    return "Pretraining" if task is None else task.upper()


def quality_table(results: Results, task: str | None) -> str:
    """Perplexity (None) or a task's score, and what was computed for it, by model and budget."""
    measure = "perplexity" if task is None else TASKS[task][0]
    form = "{:.2f}" if task is None else "{:.1f}"
    latency = latest(results, latency_of_batch=LATENCY_BATCH)
    base = quality(results, task, LARGEST, None)
    plain = [
        (measures(results, task, "flops", each, None, scale=1e-6), quality(results, task, each, None))
        for each in PLAIN
    ]
    heads = ["model", measure, f"paired difference to {LARGEST}", "to plain of equal MFLOPs"]
    heads += ["of the gated part", f"MFLOPs per {LENGTH} tokens"]
    rows = []
    for variant in VARIANTS if task is None else FINETUNED:
        for budget in budgets_of(variant):
            found = quality(results, task, variant, budget)
            apart = [] if variant == LARGEST else differences(found, base)
            compute = measures(results, task, "compute", variant, budget)
            flops = measures(results, task, "flops", variant, budget, scale=1e-6)
            above = [] if variant in PLAIN else above_line((flops, found), plain)
            name = at_budget(variant, budget)
            rows.append(
                [
                    name,
                    with_deviation(found.values(), form),
                    with_deviation(apart, form, sign=True),
                    with_deviation(above, form, sign=True),
                    with_deviation(compute.values(), "{:.2f}"),
                    with_deviation(flops.values(), "{:.0f}"),
                ]
            )
            if task is None:
                rows[-1].append(f"{latency[name]:.1f}" if name in latency else "-")
    if task is None:
        heads.append(f"ms per {LATENCY_BATCH} rows")
    return table(heads, rows)


def measures(
    results: Results,
    task: str | None,
    measure: str,
    variant: str,
    budget: float | None,
    scale: float = 1.0,
) -> dict[int, float]:
    """By seed, what a variant's runs measured in a task, or (None) in pretraining."""
    found = by_seed(results, at_budget(measure, budget), task=task, variant=variant, steps=all_steps())
    return {seed: scale * value for seed, value in found.items()}


def quality(results: Results, task: str | None, variant: str, budget: float | None) -> dict[int, float]:
    """A task's scores in per cent, or (None) the perplexity of pretraining; by seed."""
    if task is None:
        return measures(results, None, "perplexity", variant, budget)
    scale = 1 if task == "squad" else 100  # whose script gives per cent
    return measures(results, task, "score", variant, budget, scale=scale)


def draw(results: Results, path: Path) -> None:
    """Perplexity, and the scores of the tasks, against all that is computed."""
    figure, axes = panels(len(PARTS))
    for axis, task in zip(axes, PARTS, strict=True):
        for style, (name, variants) in enumerate(
            {"plain, each by itself": PLAIN, "one model with CCT": [CCT]}.items()
        ):
            points = [
                (
                    mean_and_deviation(flops.values())[0],
                    list(quality(results, task, variant, budget).values()),
                )
                for variant in variants
                for budget in budgets_of(variant)
                if (flops := measures(results, task, "flops", variant, budget, scale=1e-6))
            ]
            draw_line(axis, points, style, label=name)
        axis.set_title(title_of(task))
        axis.set_xlabel(f"MFLOPs per {LENGTH} tokens, in the layers")
        axis.set_ylabel("perplexity" if task is None else f"{TASKS[task][0]} (%)")
    save(figure, axes, path)


EXPERIMENT = Experiment(
    name="cct_bert",
    description=__doc__,
    phases=(
        Phase("pretraining", pretraining_runs, pretrain),
        Phase("finetuning", finetuning_runs, finetune, independent=True),
        Phase("latency", latency_runs, measure_latency, independent=True),
    ),
    report=report,
    needed={"models_dir": "where the pretrained models are kept"},
    optional=DATA_DIR,
    plan=lambda: [PRETRAINING, PLAIN, PLAIN_STEPS, GATES, SAMPLED, NOISE, FINETUNING, TASKS],
)

if __name__ == "__main__":
    EXPERIMENT.main()
