"""One T5 with several speeds against models cut to fewer layers, all distilled alike, in translation.

A T5 of 3 + 3 layers is trained on Multi30k, English to German. This plain model then teaches its
students, which start from its weights and train for half as many updates: itself; its cuts to 2 + 2
layers and to 1 + 1; and two checkpoints with nested budgets, which train every budget in each step. The
smaller budgets of one are narrower and have fewer layers, those of the other only have fewer layers:

    python examples/reproduce/translation_budgets.py --data_dir data \
        --models_dir runs/translation_budgets

BLEU is of greedy search over the test text, and times are of the same search, cut to as many tokens for
every model, in a phase of their own that wants a machine that does nothing else (`--phases latency`).
Models train in bf16 autocast; `--precision float32` is faster on a processor without AVX-512.
A run that was stopped goes on with the first model that it lacks. The report:

    python examples/reproduce/translation_budgets.py --report model_cards/translation_budgets
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from against_cut import AgainstCut
from corpora import multi30k, read_lines
from experiment import DATA_DIR, PRECISION, Experiment, Phase
from runs import Results, Settings
from scripts import (
    TRAINER_FLAGS,
    Flags,
    budget_argument,
    precision_flag,
    read_json,
    run_script,
    run_script_once,
)
from students import (
    ITSELF,
    LAYERS,
    NESTED,
    PLAIN,
    candidates,
    columns,
    only_layers,
    write_student,
)
from summaries import at_budget
from translation_runs import held_out_text, labelled, on_references

BUDGETS = (1.0, 0.5, 0.33, 0.2)
NESTED_LAYERS = (3, 2, 2, 1)
SEEDS = (1,)
IMPORTANCE_PAIRS = 1024
BATCH_SIZES = (1, 32)  # of the latency
LATENCY_SENTENCES, LATENCY_TOKENS = 64, 16

CUT = {"2 + 2 layers": 2, "1 + 1 layers": 1}
MODELS = (PLAIN, ITSELF, *CUT, NESTED, LAYERS)
TRAINING: Flags = {
    **TRAINER_FLAGS,
    "bf16": True,
    "attn_implementation": "eager",
    "do_train": True,
    "max_source_length": 64,
    "max_target_length": 64,
    "label_smoothing_factor": 0.1,
    "warmup_steps": 0.1,
    "lr_scheduler_type": "cosine",
    "per_device_train_batch_size": 64,
    "train_sampling_strategy": "group_by_length",
}
FIRST: Flags = {
    "model_type": "moa_t5",
    "attention_type": "mha",
    "vocab_size": 4096,
    "config_overrides": {
        "d_model": 256,
        "d_kv": 32,
        "num_heads": 8,
        "d_ff": 1024,
        "num_layers": 3,
        "dropout_rate": 0,
    },
    "optim": "adafactor",  # relative steps: AdamW leaves the embeddings, of deviation 1, where they were
    "optim_args": "scale_parameter=True",
    "learning_rate": 3e-2,
    "max_steps": 2_000,
}
FURTHER: Flags = {"learning_rate": 1e-3, "max_steps": 1_000}
OF_BUDGETS: Flags = {"budget_sampling": "all"}


def fields_of(model: str) -> dict[str, list]:
    """What makes a student with budgets."""
    if model == NESTED:
        return {"nested_budgets": [*BUDGETS], "nested_layers": [*NESTED_LAYERS]}
    if model == LAYERS:
        size = FIRST["config_overrides"]
        return only_layers([size["num_layers"], *CUT.values()], size["num_heads"], size["d_ff"])
    return {}


def budgets_of_models() -> dict[str, list[float]]:
    return {model: fields_of(model)["nested_budgets"] for model in (NESTED, LAYERS)}


def training_runs(results: Results) -> list[Settings]:
    return [{"model": model, "seed": seed} for seed in SEEDS for model in MODELS]


def latency_runs(results: Results) -> list[Settings]:
    return [{"latency_of_batch": size, "seed": SEEDS[0]} for size in BATCH_SIZES]


def measure(settings: Settings, options: argparse.Namespace) -> dict:
    """A run; the plain model is kept, which teaches."""
    model, seed = settings["model"], settings["seed"]
    if model == PLAIN:
        return _measured(teacher_of(seed, options), model, options)
    with tempfile.TemporaryDirectory() as folder:
        train(model, seed, options, Path(folder))
        return _measured(Path(folder), model, options)


def _measured(folder: Path, model: str, options: argparse.Namespace) -> dict:
    """BLEU and the references' loss; with budgets, of each."""
    from transformers import AutoModelForSeq2SeqLM

    found = read_json(folder / "all_results.json")
    student = AutoModelForSeq2SeqLM.from_pretrained(folder)
    translator = held_out_text(options, folder)
    run = {
        "train_seconds": found["train_runtime"],
        "parameters": student.num_parameters(),
        "precision": options.precision,
    }
    for budget in columns(model, budgets_of_models()).values():
        chosen = budget_argument(budget)
        outputs = on_references(student, translator, **chosen)
        run[at_budget("loss", budget)] = outputs.loss.item()
        run[at_budget("bleu", budget)] = translator.bleu(student, **chosen)
        if budget is not None:
            run[at_budget("compute", budget)] = outputs.compute_fraction.mean().item()
    return run


def teacher_of(seed: int, options: argparse.Namespace) -> Path:
    """The folder of the plain model, which is trained first if it is not there."""
    folder = Path(options.models_dir, f"{PLAIN}-{seed}")
    run_script_once("run_translation", training_flags(seed, options) | FIRST, folder)
    return folder


def train(model: str, seed: int, options: argparse.Namespace, folder: Path) -> None:
    """Train a student."""
    teacher = teacher_of(seed, options)
    with tempfile.TemporaryDirectory() as start:
        make_student(model, teacher, options, start)
        further = FURTHER | (OF_BUDGETS if fields_of(model) else {})
        flags = training_flags(seed, options) | further
        run_script("run_translation", flags | {"model_name_or_path": start, "teacher": teacher}, folder)


def training_flags(seed: int, options: argparse.Namespace) -> Flags:
    """Of all models."""
    files = multi30k(options.data_dir, options.models_dir)
    texts = {name: files[name] for name in ("train_source", "train_target")}
    return {**TRAINING, **precision_flag(options.precision), **texts, "seed": seed}


def make_student(model: str, teacher: Path, options: argparse.Namespace, folder: str) -> None:
    """Write what a student starts from."""
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    write_student(
        AutoModelForSeq2SeqLM.from_pretrained(teacher),
        folder,
        layers=CUT.get(model),
        batches=lambda: training_batches(teacher, options),
        **fields_of(model),
    )
    AutoTokenizer.from_pretrained(teacher).save_pretrained(folder)


def training_batches(tokenizer: Path, options: argparse.Namespace) -> list[dict]:
    """Labelled ones, for the importance of heads and neurons."""
    from transformers import AutoTokenizer

    files = multi30k(options.data_dir, options.models_dir)
    sources, targets = (
        [line.strip() for line in read_lines(files[f"train_{side}"])][:IMPORTANCE_PAIRS]
        for side in ("source", "target")
    )
    tokenize = AutoTokenizer.from_pretrained(tokenizer)
    return [
        labelled(tokenize, sources[i : i + 64], targets[i : i + 64]) for i in range(0, len(sources), 64)
    ]


def measure_latency(settings: Settings, options: argparse.Namespace) -> dict[str, float]:
    """Milliseconds per sentence of a greedy search for as many tokens each, by model and budget."""
    from transformers import AutoModelForSeq2SeqLM

    from hf_moa.timing import compare

    plain = teacher_of(settings["seed"], options)
    translator = held_out_text(options, plain, LATENCY_SENTENCES, settings["latency_of_batch"])
    timed = candidates(
        MODELS,
        budgets_of_models(),
        {PLAIN: plain},
        lambda name, folder: make_student(name, plain, options, folder),
        AutoModelForSeq2SeqLM,
        lambda model, chosen: translator.translate(model, new_tokens=LATENCY_TOKENS, **chosen),
    )
    times = compare(timed, turns=11, title="latency")
    return {time.name: time.value / LATENCY_SENTENCES for time in times}


def report(results: Results, folder: Path) -> str:
    """Tables in Markdown; the figure is written to `folder`."""
    runs = AgainstCut(
        results,
        {},
        measure="bleu",
        name="BLEU",
        full="3 + 3 layers",
        cut=tuple(CUT),
        budgets=budgets_of_models(),
        batch_sizes=BATCH_SIZES,
        unit="ms per sentence",
    )
    return runs.report(folder / "bleu.svg")


EXPERIMENT = Experiment(
    name="translation_budgets",
    description=__doc__,
    phases=(
        Phase("training", training_runs, measure),
        Phase("latency", latency_runs, measure_latency),
    ),
    report=report,
    needed={"models_dir": "where the plain model is kept, which teaches"},
    optional=DATA_DIR | PRECISION,
    plan=lambda: [TRAINING, FIRST, FURTHER, OF_BUDGETS, CUT, NESTED_LAYERS, BUDGETS, IMPORTANCE_PAIRS],
)

if __name__ == "__main__":
    EXPERIMENT.main()
