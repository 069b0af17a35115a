"""MAE in translation: Peng et al. 2020, tables 2 and 3, on Multi30k and Tatoeba, English to German.

    python examples/reproduce/mae_translation.py --data_dir data --models_dir runs/mae_translation

The paper's variants, of one size, trained for the same number of updates on the same batches: plain
multi-head attention (BASE); a mixture of 8 experts of 7 heads (28 of 6) trained by block coordinate
descent (MAE-7, MAE-6), with uniform gates (UNI-MAE-7, UNI-MAE-6), and jointly (NOBCD). Of every five
epochs, taken to be 100 updates long, the first has G steps. In runs so much shorter than the paper's
the gates' SGD cannot go far at the paper's rate of 1: MAE-7 with 10 and 100 times that rate stands
beside them. sacreBLEU, beams of 5, the last 5 checkpoints averaged.

The paper's models go over their data many times; so do, in a third set of runs, some of the variants
over the first 5,000 pairs of Multi30k, in as many updates. In a fourth the learning rate on Multi30k is
that which `moa_scaling.py` chose for plain attention on the validation text, twice that of the others.

`corpora.py` says which files. A run that was stopped goes on where it was; the models stay in
`--models_dir` (specialisation.py reads them). The report:

    python examples/reproduce/mae_translation.py --report model_cards/mae_translation
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from experiment import TATOEBA_DIR, Experiment, Phase
from figures import Panel, draw_variants
from runs import Results, Settings
from scripts import Flags, run_folder
from summaries import Column, time_and_machine, variant_table
from translation_runs import CORPORA, FLAGS, train_translation

SEEDS = (1, 2, 3)
STEPS = {"multi30k": 1_500, "tatoeba": 1_500}
SMALL: dict[str, Any] = {"corpus": "multi30k", "pairs": 5_000, "steps": 1_500}
VARIANTS_OF_SMALL = ("BASE", "UNI-MAE-7", "MAE-7")
FASTER: dict[str, Any] = {"corpus": "multi30k", "steps": 1_500, "learning_rate": 6e-2}
VARIANTS_OF_FASTER = ("BASE", "NOBCD", "UNI-MAE-7", "MAE-7")

BCD: Flags = {"attention_type": "mae", "mae_training": "bcd", "gate_epoch_steps": 100}
VARIANTS: dict[str, Flags] = {
    "BASE": {"attention_type": "mha"},
    "NOBCD": {"attention_type": "mae", "mae_training": "joint"},
    "UNI-MAE-7": {"attention_type": "mae", "mae_gate_type": "uniform", "mae_training": "expert"},
    "UNI-MAE-6": {
        "attention_type": "mae",
        "mae_gate_type": "uniform",
        "mae_training": "expert",
        "mae_num_dropped_heads": 2,
    },
    "MAE-7": BCD,
    "MAE-6": {**BCD, "mae_num_dropped_heads": 2},
    "MAE-7, gate rate 10": {**BCD, "gate_learning_rate": 10},
    "MAE-7, gate rate 100": {**BCD, "gate_learning_rate": 100},
}
# the first is what the others differ from
AGAINST_MAE_7 = (
    "MAE-7",
    "MAE-6",
    "UNI-MAE-7",
    "NOBCD",
    "MAE-7, gate rate 10",
    "MAE-7, gate rate 100",
)


def runs(results: Results) -> list[Settings]:
    return [
        {"corpus": corpus, "variant": variant, "steps": STEPS[corpus], "seed": seed}
        for seed in SEEDS
        for corpus in CORPORA
        for variant in VARIANTS
    ]


def small_runs(results: Results) -> list[Settings]:
    return [{**SMALL, "variant": each, "seed": seed} for seed in SEEDS for each in VARIANTS_OF_SMALL]


def faster_runs(results: Results) -> list[Settings]:
    return [{**FASTER, "variant": each, "seed": seed} for seed in SEEDS for each in VARIANTS_OF_FASTER]


def model_folder(models_dir: str | Path, settings: Settings) -> Path:
    parts = ("corpus", "pairs", "learning_rate")
    corpus = "-".join(str(settings[name]) for name in parts if name in settings)
    return run_folder(Path(models_dir, corpus), settings["variant"], settings["seed"])


def train(settings: Settings, options: argparse.Namespace) -> dict:
    names = {"pairs": "max_train_samples", "learning_rate": "learning_rate"}
    flags = {flag: settings[name] for name, flag in names.items() if name in settings}
    return train_translation(
        settings["corpus"],
        {**VARIANTS[settings["variant"]], **flags},
        steps=settings["steps"],
        seed=settings["seed"],
        data_dir=options.data_dir,
        work_dir=options.models_dir,
        folder=model_folder(options.models_dir, settings),
    )


def trained_model(settings: Settings, options: argparse.Namespace) -> Path:
    """The folder of a run's model, which is trained first if it is not there."""
    train(settings, options)
    return model_folder(options.models_dir, settings)


def measure(settings: Settings, options: argparse.Namespace) -> dict:
    found = train(settings, options)
    return {"bleu": found["bleu"], "loss": found["eval_loss"], "tokens": found["tokens"]}


def report(results: Results, folder: Path) -> str:
    """BLEU and test loss of each variant, and the differences to BASE and to MAE-7, seed by seed; the
    figure is written to `folder`."""
    bleu = Column("BLEU", "bleu", "{:.2f}", paired=True)
    columns = [bleu, Column("test loss", "loss", "{:.3f}", paired=True)]
    parts, measures = [], []
    for title, settings, tables in groups():
        measures.append(Panel(bleu, title, settings))
        parts += [
            f"### {title}",
            *(variant_table(results, variants, columns, **settings) for variants in tables),
            time_and_machine(results, **settings),
        ]
    draw_variants(results, VARIANTS, measures, folder / "bleu.svg")
    return "\n\n".join(parts)


def groups() -> list[tuple[str, Settings, list[Iterable[str]]]]:
    """Title, settings and the variants of each table of the runs that the report shows together."""
    usual = {"pairs": None, "learning_rate": None}
    return [
        *(
            (corpus, {"corpus": corpus, "steps": STEPS[corpus], **usual}, [VARIANTS, AGAINST_MAE_7])
            for corpus in CORPORA
        ),
        (f"{SMALL['corpus']}, the first {SMALL['pairs']:,} pairs", SMALL, [VARIANTS_OF_SMALL]),
        (
            f"{FASTER['corpus']}, learning rate {FASTER['learning_rate']:g}",
            FASTER,
            [VARIANTS_OF_FASTER],
        ),
    ]


EXPERIMENT = Experiment(
    name="mae_translation",
    description=__doc__,
    phases=(
        Phase("training", runs, measure),
        Phase("few pairs", small_runs, measure, independent=True),
        Phase("learning rate", faster_runs, measure, independent=True),
    ),
    report=report,
    needed=TATOEBA_DIR | {"models_dir": "where the trained models are kept"},
    plan=lambda: [FLAGS, VARIANTS],
)

if __name__ == "__main__":
    EXPERIMENT.main()
