"""MAE in language modelling: Peng et al. 2020, table 4, on WikiText-2.

    python examples/reproduce/mae_language_modelling.py --data_dir data

A small GPT-2 of 8 heads, five epochs on a part of the training text, of which the first has G steps:
plain (BASE), and MAE trained jointly (NOBCD), with uniform gates (UNI-MAE-7) and by block coordinate
descent (MAE-7); MAE-7 also with gates at 100 and 1,000 times the paper's learning rate, since the run is
so much shorter than the paper's. Test perplexity per token, and the gates' entropy. A run that was
stopped goes on where it was. The report:

    python examples/reproduce/mae_language_modelling.py --report model_cards/mae_language_modelling
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from corpora import wikitext
from experiment import DATA_DIR, WORK_DIR, Experiment, Phase
from figures import Panel, draw_variants
from gate_measures import mae_gates, tables_of
from runs import Results, Settings
from scripts import TRAINER_FLAGS, Flags, run_script
from summaries import Column, time_and_machine, variant_table

from hf_moa.cli.command import load_checkpoint

SEEDS = (1, 2, 3)
BLOCKS, EPOCHS = 3_600, 5

BCD: Flags = {"attention_type": "mae", "mae_training": "bcd"}
VARIANTS: dict[str, Flags] = {
    "BASE": {"attention_type": "mha"},
    "NOBCD": {"attention_type": "mae", "mae_training": "joint"},
    "UNI-MAE-7": {"attention_type": "mae", "mae_gate_type": "uniform", "mae_training": "expert"},
    "MAE-7": BCD,
    "MAE-7, gate rate 100": {**BCD, "gate_learning_rate": 100},
    "MAE-7, gate rate 1000": {**BCD, "gate_learning_rate": 1000},
}
FLAGS: Flags = {
    **TRAINER_FLAGS,
    "bf16": True,
    "model_type": "moa_gpt2",
    "vocab_size": 4096,
    "config_overrides": {"n_layer": 3, "n_embd": 128, "n_head": 8, "n_positions": 128},
    "max_train_samples": BLOCKS,
    "do_train": True,
    "do_predict": True,
    "num_train_epochs": EPOCHS,
    "learning_rate": 2e-3,
    "warmup_steps": 100,
    "lr_scheduler_type": "cosine",
    "per_device_train_batch_size": 16,
    "per_device_eval_batch_size": 64,
}


def runs(results: Results) -> list[Settings]:
    return [
        {"variant": variant, "blocks": BLOCKS, "epochs": EPOCHS, "seed": seed}
        for seed in SEEDS
        for variant in VARIANTS
    ]


def measure(settings: Settings, options: argparse.Namespace) -> dict:
    """One run of `examples/run_clm.py`."""
    files = wikitext("wikitext-2", options.data_dir, options.work_dir)
    flags = {
        **FLAGS,
        **VARIANTS[settings["variant"]],
        "train_file": files["train"],
        "test_file": files["test"],
        "seed": settings["seed"],
    }
    with tempfile.TemporaryDirectory() as folder:
        found = run_script("run_clm", flags, folder)
        measured = {"perplexity": found["predict_perplexity"], "train_seconds": found["train_runtime"]}
        if VARIANTS[settings["variant"]]["attention_type"] == "mae":
            measured |= mae_gates(tables_of(load_checkpoint(folder), folder, files["test"], limit=1_000))
        return measured


def report(results: Results, folder: Path) -> str:
    """The table in Markdown; the figure is written to `folder`."""
    columns = [
        Column("perplexity", "perplexity", "{:.2f}", paired=True),
        Column("gate entropy (uniform: 2.079)", "entropy", "{:.3f}"),
        Column("positions of the most used expert", "largest_share", "{:.0%}"),
    ]
    size = {"blocks": BLOCKS, "epochs": EPOCHS}
    measures = [Panel(each, settings=size) for each in columns[:2]]
    draw_variants(results, VARIANTS, measures, folder / "perplexity.svg")
    found = variant_table(results, VARIANTS, columns, **size)
    return f"{found}\n\n{time_and_machine(results)}"


EXPERIMENT = Experiment(
    name="mae_language_modelling",
    description=__doc__,
    phases=(Phase("training", runs, measure),),
    report=report,
    needed={},
    optional=DATA_DIR | WORK_DIR,
    plan=lambda: [FLAGS, VARIANTS],
)

if __name__ == "__main__":
    EXPERIMENT.main()
