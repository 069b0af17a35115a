"""Adapting a translation model through its gates: Peng et al. 2020, section 5.2, table 7 and figure 2.

    python examples/reproduce/transfer.py --data_dir data --models_dir runs/transfer

MAE-7 models of Tatoeba, trained as in mae_translation.py but four times as long, are adapted to Multi30k
with 5 to 100 % of its training data: not at all (NOFT), their gates (FTG), gates and attention's output
projections (FTG+), everything (FTALL); beside these LoRA, of as many parameters as FTG, and a new model
of the same size and vocabulary (SCRATCH). BLEU of the test text. Seed s starts from the s-th model; the
first so many pairs are the data of all seeds. All runs have the same number of updates, whatever the
share of the data, but those of new models, which need more and have three times as many.

What gates can do depends on how far experts differ, so FTG and FTG+ also adapt models whose experts
differ more (specialisation.py): trained jointly with their gates (NOBCD of mae_translation.py), and with
gates that learn a hundred times faster; with all the data and one seed.

Each method's learning rate is chosen first, with a quarter of the data, on the validation text, from the
first model and with a seed that the report leaves out. A run that was stopped goes on where it was. The
report:

    python examples/reproduce/transfer.py --report model_cards/transfer
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import mae_translation
from corpora import multi30k
from experiment import TATOEBA_DIR, Experiment, Phase
from figures import draw_line, panels, save
from runs import Results, Settings
from scripts import TRAINER_FLAGS, Flags, run_script
from summaries import best_rate, by_seed, differences, latest, time_and_machine, with_deviation
from translation_runs import FLAGS

from hf_moa.cli.command import load_checkpoint
from hf_moa.markdown import table

SEEDS = mae_translation.SEEDS
FRACTIONS = (0.05, 0.1, 0.25, 0.5, 1.0)
TUNING = {"fraction": 0.25, "seed": 0}
PAIRS = 29_000
# those of mae_translation.py leave models that know next to nothing of Multi30k: BLEU of 1
STEPS_OF_PRETRAINING = 4 * mae_translation.STEPS["tatoeba"]
STEPS, STEPS_FROM_SCRATCH = 400, 1_200

RATES_OF_ADAPTERS = (1e-3, 3e-3, 1e-2, 3e-2)
# name -> learning rates to choose from; NOFT has none. Of whole models they are Adafactor's, with which
# those of mae_translation.py were trained.
METHODS: dict[str, tuple[float, ...]] = {
    "NOFT": (),
    "FTG": RATES_OF_ADAPTERS,
    "FTG+": (*RATES_OF_ADAPTERS, 1e-1),
    "LoRA": RATES_OF_ADAPTERS,
    "FTALL": (3e-3, 1e-2, 3e-2, 6e-2),
    "SCRATCH": (1e-2, 3e-2, 6e-2),
}
WHOLE = ("FTALL", "SCRATCH")
BASE = "MAE-7"  # of mae_translation.py
OTHER_BASES = ("NOBCD", "MAE-7, gate rate 100")
SEED_OF_OTHER_BASES = 1
METHODS_OF_OTHER_BASES = ("NOFT", "FTG", "FTG+")
WARMUP = 0.1  # of the steps


def as_pretrained(*names: str) -> Flags:
    """Flags that are those of the pretrained models."""
    return {name: FLAGS[name] for name in names}


TEXTS = as_pretrained(
    "max_source_length", "max_target_length", "num_beams", "per_device_eval_batch_size"
)
TRAINING: Flags = {
    "mae_training": "joint",
    **as_pretrained("lr_scheduler_type", "label_smoothing_factor"),
    **as_pretrained("per_device_train_batch_size", "train_sampling_strategy"),
}


def tuning_runs(results: Results) -> list[Settings]:
    return [
        {"method": method, "learning_rate": rate, **TUNING}
        for method, rates in METHODS.items()
        for rate in rates
    ]


def final_runs(results: Results) -> list[Settings]:
    return [
        {
            "method": method,
            "learning_rate": chosen_rate(results, method),
            "fraction": fraction,
            "seed": seed,
        }
        for seed in SEEDS
        for method, rates in METHODS.items()
        for fraction in (FRACTIONS if rates else (0.0,))
    ]


def other_base_runs(results: Results) -> list[Settings]:
    return [run for base in OTHER_BASES for run in runs_of_base(results, base)]


def runs_of_base(results: Results, base: str | None) -> list[Settings]:
    """All the data, by method; None: from the base of the other runs."""
    return [
        {
            "method": method,
            "learning_rate": chosen_rate(results, method),
            "fraction": FRACTIONS[-1] if METHODS[method] else 0.0,
            "base": base,
            "seed": SEED_OF_OTHER_BASES,
        }
        for method in METHODS_OF_OTHER_BASES
    ]


def chosen_rate(results: Results, method: str) -> float:
    """That with the best validation BLEU of the tuning runs; NOFT trains nothing."""
    return best_rate(results, "bleu", method=method, **TUNING) if METHODS[method] else 0.0


def num_steps(method: str) -> int:
    return STEPS_FROM_SCRATCH if method == "SCRATCH" else STEPS


def measure(settings: Settings, options: argparse.Namespace) -> dict:
    """One run; of a tuning run, BLEU of the validation text."""
    source = {
        "corpus": "tatoeba",
        "variant": settings.get("base", BASE),
        "steps": STEPS_OF_PRETRAINING,
        "seed": settings["seed"] or SEEDS[0],
    }
    base = mae_translation.trained_model(source, options)
    files = multi30k(options.data_dir, options.models_dir)
    text = "validation" if settings["seed"] == TUNING["seed"] else "test"
    flags: Flags = {
        **TEXTS,
        "train_source": files["train_source"],
        "train_target": files["train_target"],
        "seed": settings["seed"],
    }
    if settings["method"] != "NOFT":
        flags |= {
            **TRAINING,
            "learning_rate": settings["learning_rate"],
            "max_train_samples": round(settings["fraction"] * PAIRS),
        }
    train = train_whole if settings["method"] in WHOLE else train_adapter
    held_out = files[f"{text}_source"], files[f"{text}_target"]
    with tempfile.TemporaryDirectory() as folder:
        return train(settings["method"], base, flags, num_steps(settings["method"]), held_out, folder)


def train_whole(
    method: str, base: Path, flags: Flags, steps: int, held_out: tuple[str, str], folder: str
) -> dict:
    """All weights, by `examples/run_translation_no_trainer.py`: those of the pretrained model, or new
    ones of its config and vocabulary."""
    scratch = {"config_name": base, "tokenizer_name": base}
    flags |= {
        **as_pretrained("optim"),
        **(scratch if method == "SCRATCH" else {"model_name_or_path": base}),
        "validation_source": held_out[0],
        "validation_target": held_out[1],
        "max_train_steps": steps,
        "num_warmup_steps": round(WARMUP * steps),
        "eval_steps": steps + 1,  # only in the end
    }
    found = run_script("run_translation_no_trainer", flags, folder)
    size = load_checkpoint(folder).num_parameters()
    return {"bleu": found["bleu"], "loss": found["eval_loss"], "trainable_parameters": size}


def train_adapter(
    method: str, base: Path, flags: Flags, steps: int, held_out: tuple[str, str], folder: str
) -> dict:
    """An adapter of the pretrained model, by `examples/run_translation.py`; with NOFT, nothing."""
    adapters = {"FTG": "ftg", "FTG+": "ftg+", "LoRA": "lora"}
    flags |= {
        **TRAINER_FLAGS,
        "model_name_or_path": base,
        "test_source": held_out[0],
        "test_target": held_out[1],
        "do_predict": True,
        "predict_with_generate": True,
    }
    if method in adapters:
        flags |= {
            "adapter": adapters[method],
            "do_train": True,
            "max_steps": steps,
            "warmup_steps": WARMUP,
        }
    found = run_script("run_translation", flags, folder)
    return {
        "bleu": found["predict_bleu"],
        "loss": found["predict_loss"],
        "trainable_parameters": found.get("trainable_parameters", 0),
    }


def report(results: Results, folder: Path) -> str:
    """Tables in Markdown; the figure is written to `folder`."""
    draw(results, folder / "bleu.svg")
    rows = []
    for method, rates in METHODS.items():
        found = results.find(method=method)
        size = f"{found[0]['measured']['trainable_parameters']:,}" if found else "-"
        rate = f"{chosen_rate(results, method):g}" if rates else ""
        shown = (with_deviation(bleus(results, method, f).values()) for f in FRACTIONS)
        rows.append([method, size, rate, *shown])
    heads = ["method", "trained parameters", "learning rate", *(f"{f:.0%}" for f in FRACTIONS)]
    return "\n\n".join(
        [
            table(heads, rows),
            time_and_machine(results),
            "Difference to FTG+, seed by seed:",
            against_ftg_plus(results),
            "### By the experts' training",
            bases(results),
        ]
    )


def against_ftg_plus(results: Results) -> str:
    """How far the other methods are above it."""
    rows = []
    for method in METHODS:
        if method != "FTG+":
            pairs = ((bleus(results, method, f), bleus(results, "FTG+", f)) for f in FRACTIONS)
            apart = (with_deviation(differences(*pair), sign=True) for pair in pairs)
            rows.append([method, *apart])
    return table(["method", *(f"{f:.0%}" for f in FRACTIONS)], rows)


def bases(results: Results) -> str:
    """BLEU with all the data, by how the base's experts were trained."""
    rows = []
    for base in (None, *OTHER_BASES):
        found = [latest(results, **run) for run in runs_of_base(results, base)]
        rows.append([base or BASE, *(f"{each['bleu']:.1f}" if each else "-" for each in found)])
    return table([f"base, seed {SEED_OF_OTHER_BASES}", *METHODS_OF_OTHER_BASES], rows)


def bleus(results: Results, method: str, fraction: float) -> dict[int, float]:
    """By seed; without any adaptation the same for every share of the data."""
    rate, fraction = chosen_rate(results, method), fraction if METHODS[method] else 0.0
    found = by_seed(results, "bleu", method=method, fraction=fraction, learning_rate=rate, base=None)
    return {seed: value for seed, value in found.items() if seed in SEEDS}


def draw(results: Results, path: Path) -> None:
    """BLEU against the share of the data, in the form of the paper's figure 2."""
    figure, [axis] = panels(1)
    for style, method in enumerate(METHODS):
        points = [(100 * f, list(bleus(results, method, f).values())) for f in FRACTIONS]
        draw_line(axis, points, style, label=method)
    axis.set_xlabel("share of Multi30k's training data (%)")
    axis.set_ylabel("BLEU")
    save(figure, [axis], path)


EXPERIMENT = Experiment(
    name="transfer",
    description=__doc__,
    phases=(
        Phase("rates", tuning_runs, measure),
        Phase("fractions", final_runs, measure),
        Phase("other bases", other_base_runs, measure),
    ),
    report=report,
    needed=TATOEBA_DIR
    | {"models_dir": "where the pretrained models are kept; those that it lacks are trained"},
    plan=lambda: [
        mae_translation.EXPERIMENT.plan(),
        STEPS_OF_PRETRAINING,
        TEXTS,
        TRAINING,
        WARMUP,
        STEPS,
        STEPS_FROM_SCRATCH,
    ],
)

if __name__ == "__main__":
    EXPERIMENT.main()
