"""One GPT-2 with several speeds against models cut to fewer layers, all distilled alike.

A GPT-2 of 6 layers is trained on WikiText-2. This plain model then teaches its students, which start
from its weights and train for half as many updates: itself; its cuts to 3 and to 2 layers; and two
checkpoints with nested budgets, which train every budget in each step. The budgets of one are narrower
and have fewer layers, those of the other only have fewer layers:

    python examples/reproduce/language_model_budgets.py --data_dir data \
        --models_dir runs/language_model_budgets

Perplexity is per token of the test text, and times are of a greedy search, in a phase of their own that
wants a machine that does nothing else (`--phases latency`). Models train in bf16 autocast;
`--precision float32` is faster on a processor without AVX-512. A run that was stopped goes on with the
first model that it lacks. The report:

    python examples/reproduce/language_model_budgets.py --report model_cards/language_model_budgets
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from against_cut import AgainstCut
from corpora import read_lines, wikitext
from experiment import DATA_DIR, PRECISION, Experiment, Phase
from runs import Results, Settings
from scripts import (
    TRAINER_FLAGS,
    Flags,
    precision_flag,
    read_json,
    run_folder,
    run_script,
    run_script_once,
)
from students import ITSELF, LAYERS, NESTED, PLAIN, candidates, only_layers, write_student
from summaries import at_budget

BUDGETS = (1.0, 0.5, 0.33)
NESTED_LAYERS = (6, 4, 3)
SEEDS = (1,)
BLOCK = 128  # tokens
IMPORTANCE_BLOCKS = 256
BATCH_SIZES = (1, 32)  # of the latency
LATENCY_PROMPTS = {1: 4, 32: 32}  # by batch size
LATENCY_TOKENS = 64  # of a prompt, and as many more

CUT = {"3 layers": 3, "2 layers": 2}
MODELS = (PLAIN, ITSELF, *CUT, NESTED, LAYERS)
TRAINING: Flags = {
    **TRAINER_FLAGS,
    "bf16": True,
    "attn_implementation": "eager",
    "do_train": True,
    "do_eval": True,
    "block_size": BLOCK,
    "warmup_steps": 0.1,
    "lr_scheduler_type": "cosine",
    "per_device_train_batch_size": 16,
    "per_device_eval_batch_size": 32,
}
FIRST: Flags = {
    "model_type": "moa_gpt2",
    "attention_type": "mha",
    "vocab_size": 4096,
    "config_overrides": {
        "n_layer": 6,
        "n_embd": 256,
        "n_head": 8,
        "n_positions": BLOCK,
        "embd_pdrop": 0,
        "attn_pdrop": 0,
        "resid_pdrop": 0,
    },
    "learning_rate": 2e-3,
    "max_steps": 2_000,
}
FURTHER: Flags = {"learning_rate": 1e-3, "max_steps": 1_000}
OF_BUDGETS: Flags = {"budget_sampling": "all", "eval_budgets": True}


def fields_of(model: str) -> dict[str, list]:
    """What makes a student with budgets."""
    if model == NESTED:
        return {"nested_budgets": [*BUDGETS], "nested_layers": [*NESTED_LAYERS]}
    if model == LAYERS:
        size = FIRST["config_overrides"]
        return only_layers([size["n_layer"], *CUT.values()], size["n_head"], 4 * size["n_embd"])
    return {}


def budgets_of_models() -> dict[str, list[float]]:
    return {model: fields_of(model)["nested_budgets"] for model in (NESTED, LAYERS)}


def training_runs(results: Results) -> list[Settings]:
    return [{"model": model, "seed": seed} for seed in SEEDS for model in MODELS]


def latency_runs(results: Results) -> list[Settings]:
    return [{"latency_of_batch": size, "seed": SEEDS[0]} for size in BATCH_SIZES]


def measure(settings: Settings, options: argparse.Namespace) -> dict[str, Any]:
    """A run; the plain model is kept, which teaches."""
    model, seed = settings["model"], settings["seed"]
    teacher = teacher_of(seed, options)
    if model == PLAIN:
        return measured(teacher, options)
    with tempfile.TemporaryDirectory() as start, tempfile.TemporaryDirectory() as folder:
        make_student(model, teacher, options, start)
        further = FURTHER | (OF_BUDGETS if fields_of(model) else {})
        flags = training_flags(seed, options) | further
        run_script("run_clm", flags | {"model_name_or_path": start, "teacher": teacher}, folder)
        return measured(Path(folder), options)


def measured(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Perplexity; with budgets, of each."""
    found = read_json(folder / "all_results.json")
    run = {
        "train_seconds": found["train_runtime"],
        "parameters": found["trainable_parameters"],
        "precision": options.precision,
        "perplexity": found["eval_perplexity"],
    }
    budgets = folder / "budget_results_validation.json"
    if budgets.is_file():
        for row in read_json(budgets):
            run[at_budget("perplexity", row["budget"])] = row["eval_perplexity"]
            run[at_budget("compute", row["budget"])] = row["compute_fraction"]
    return run


def teacher_of(seed: int, options: argparse.Namespace) -> Path:
    """The folder of the plain model, which is trained first if it is not there."""
    folder = run_folder(options.models_dir, PLAIN, seed)
    run_script_once("run_clm", training_flags(seed, options) | FIRST, folder)
    return folder


def training_flags(seed: int, options: argparse.Namespace) -> Flags:
    """Of all models."""
    files = wikitext("wikitext-2", options.data_dir, options.models_dir)
    texts = {"train_file": files["train"], "validation_file": files["test"]}
    return {**TRAINING, **precision_flag(options.precision), **texts, "seed": seed}


def make_student(model: str, teacher: Path, options: argparse.Namespace, folder: str) -> None:
    """Write what a student starts from."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    write_student(
        AutoModelForCausalLM.from_pretrained(teacher),
        folder,
        layers=CUT.get(model),
        batches=lambda: blocks("train", teacher, options, IMPORTANCE_BLOCKS, 32),
        **fields_of(model),
    )
    AutoTokenizer.from_pretrained(teacher).save_pretrained(folder)


def blocks(
    split: str, tokenizer: Path, options: argparse.Namespace, count: int, size: int
) -> list[dict[str, Any]]:
    """The first blocks of a text, labelled, in batches of a size."""
    from torch.utils.data import DataLoader
    from transformers import AutoTokenizer

    from hf_moa.recipes.text_blocks import TextBlocks, first_samples

    lines = read_lines(wikitext("wikitext-2", options.data_dir, options.models_dir)[split])
    found = TextBlocks(lines[: 20 * count], AutoTokenizer.from_pretrained(tokenizer), BLOCK)
    return list(DataLoader(first_samples(found, count), batch_size=size))


def measure_latency(settings: Settings, options: argparse.Namespace) -> dict[str, float]:
    """Milliseconds per new token of a greedy search, by model and budget."""
    from transformers import AutoModelForCausalLM

    from hf_moa.timing import compare

    size, plain = settings["latency_of_batch"], teacher_of(settings["seed"], options)
    batches = blocks("test", plain, options, LATENCY_PROMPTS[size], size)
    prompts = [batch["input_ids"][:, :LATENCY_TOKENS] for batch in batches]

    def search(model: Any, chosen: dict) -> None:
        new = {"min_new_tokens": LATENCY_TOKENS, "max_new_tokens": LATENCY_TOKENS}
        for ids in prompts:
            model.generate(ids, attention_mask=ids.new_ones(ids.shape), do_sample=False, **new, **chosen)

    timed = candidates(
        MODELS,
        budgets_of_models(),
        {PLAIN: plain},
        lambda name, folder: make_student(name, plain, options, folder),
        AutoModelForCausalLM,
        search,
    )
    times = compare(timed, turns=11, title="latency")
    return {time.name: time.value / (LATENCY_PROMPTS[size] * LATENCY_TOKENS) for time in times}


def report(results: Results, folder: Path) -> str:
    """Tables in Markdown; the figure is written to `folder`."""
    runs = AgainstCut(
        results,
        {},
        measure="perplexity",
        name="perplexity",
        points="perplexity",
        full="6 layers",
        cut=tuple(CUT),
        budgets=budgets_of_models(),
        batch_sizes=BATCH_SIZES,
        unit="ms per token",
    )
    return runs.report(folder / "perplexity.svg")


EXPERIMENT = Experiment(
    name="language_model_budgets",
    description=__doc__,
    phases=(
        Phase("training", training_runs, measure),
        Phase("latency", latency_runs, measure_latency),
    ),
    report=report,
    needed={"models_dir": "where the plain model is kept, which teaches"},
    optional=DATA_DIR | PRECISION,
    plan=lambda: [
        TRAINING,
        FIRST,
        FURTHER,
        OF_BUDGETS,
        CUT,
        {model: fields_of(model) for model in (NESTED, LAYERS)},
        IMPORTANCE_BLOCKS,
    ],
)

if __name__ == "__main__":
    EXPERIMENT.main()
