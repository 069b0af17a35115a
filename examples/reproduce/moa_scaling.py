"""MoA: more experts at constant compute. Zhang et al. 2022, on WikiText-2 and Multi30k.

    python examples/reproduce/moa_scaling.py --data_dir data

- masked language models with 8 active heads of 8, 16, 32 and 64, against multi-head attention of as many
  multiply-accumulates: perplexity of masked tokens;
- the same, 8 of 32, without the balance loss, without the z loss, and without both: expert load;
- translation: multi-head attention against MoA with 8 active heads of 8 and of 16 (8K8E, 8K16E).

MoA's heads are larger than those of multi-head attention, so that a layer's attention computes about as
much (`attention_flops` per token, at the length of the texts). A run that was stopped goes on where it
was. The report:

    python examples/reproduce/moa_scaling.py --report model_cards/moa_scaling
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from experiment import DATA_DIR, WORK_DIR, Experiment, Phase
from figures import draw_line, panels, save
from gate_measures import LOAD_CV, LOAD_MAX, UNUSED, balance, tables_of
from runs import Results, Settings
from scripts import Flags, merged
from summaries import Column, by_seed, time_and_machine, variant_table
from translation_runs import FLAGS, train_translation
from wikitext_runs import train_on_wikitext2

from hf_moa_cli.command import load_checkpoint

SEEDS = (1, 2, 3)
EXPERTS = (8, 16, 32, 64)
STEPS = {"masked": 1_500, "translation": 1_800}
LENGTHS = {"masked": 128, "translation": 16}  # tokens of a text, of Multi30k on average

MHA: Flags = {"attention_type": "mha"}
BERT_HEAD, T5_HEAD = {"head_dim": 22}, {"d_kv": 28}


def moa(num_experts: int, head: dict[str, int], **losses: float) -> Flags:
    """MoA with 8 active heads.

    Args:
        head: its size, under the name that the config has for it.
        losses: their coefficients, where they are not the defaults.
    """
    overrides = {f"router_{name}_loss_coef": value for name, value in losses.items()}
    return {
        "attention_type": "moa",
        "num_attention_experts": num_experts,
        "config_overrides": {**head, **overrides},
    }


VARIANTS: dict[str, dict[str, Flags]] = {
    "masked": {
        "MHA": MHA,
        **{f"MoA 8 of {n}": moa(n, BERT_HEAD) for n in EXPERTS},
        "MoA 8 of 32, no balance loss": moa(32, BERT_HEAD, balance=0),
        "MoA 8 of 32, no z loss": moa(32, BERT_HEAD, z=0),
        "MoA 8 of 32, neither": moa(32, BERT_HEAD, balance=0, z=0),
    },
    "translation": {
        "MHA (BASE)": MHA,
        "MoA 8K8E": moa(8, T5_HEAD),
        "MoA 8K16E": moa(16, T5_HEAD),
    },
}
MASKED: Flags = {
    "model_type": "moa_bert",
    "vocab_size": 8192,
    "config_overrides": {
        "hidden_size": 128,
        "num_attention_heads": 8,
        "num_hidden_layers": 4,
        "intermediate_size": 512,
        "max_position_embeddings": LENGTHS["masked"],
        "hidden_dropout_prob": 0,
        "attention_probs_dropout_prob": 0,
    },
    "max_seq_length": LENGTHS["masked"],
    "learning_rate": 2e-3,
    "num_warmup_steps": 150,
    "lr_scheduler_type": "cosine",
    "weight_decay": 0.01,
    "per_device_train_batch_size": 32,
    "per_device_eval_batch_size": 64,
}


def runs(results: Results) -> list[Settings]:
    return [
        {"task": task, "variant": variant, "steps": STEPS[task], "seed": seed}
        for seed in SEEDS
        for task, variants in VARIANTS.items()
        for variant in variants
    ]


def measure(settings: Settings, options: argparse.Namespace) -> dict:
    """One training run, and the expert load on the test text."""
    train = {"masked": masked, "translation": translation}[settings["task"]]
    flags = VARIANTS[settings["task"]][settings["variant"]]
    with tempfile.TemporaryDirectory() as folder:
        return train(flags, settings, options, folder)


def masked(flags: Flags, settings: Settings, options: argparse.Namespace, folder: str) -> dict:
    found = train_on_wikitext2(
        "run_mlm_no_trainer",
        merged(MASKED, flags),
        steps=settings["steps"],
        seed=settings["seed"],
        data_dir=options.data_dir,
        work_dir=options.work_dir,
        folder=folder,
    )
    return {"perplexity": found["perplexity"], **model_facts(folder, found["files"]["test"])}


def translation(flags: Flags, settings: Settings, options: argparse.Namespace, folder: str) -> dict:
    found = train_translation(
        "multi30k",
        flags,
        steps=settings["steps"],
        seed=settings["seed"],
        data_dir=options.data_dir,
        work_dir=options.work_dir,
        folder=folder,
    )
    files = found["files"]
    facts = model_facts(folder, files["test_source"], files["test_target"])
    return {"bleu": found["bleu"], "loss": found["eval_loss"], **facts}


def model_facts(folder: str, text: str, target: str | None = None) -> dict[str, Any]:
    """Size, multiply-accumulates of attention per token, and the experts' load on the first lines."""
    from hf_moa.modeling.flops import count_flops

    model = load_checkpoint(folder)
    length = LENGTHS["masked" if target is None else "translation"]
    flops = count_flops(model, *([length] if target is None else [length, length]))
    attention = sum(part.active for part in flops.parts if part.part.endswith("attention"))
    facts = {"parameters": model.num_parameters(), "attention_flops": attention / length}
    if model.config.attention_type == "moa":
        facts |= balance(tables_of(model, folder, text, target=target, limit=1_000))
    return facts


def report(results: Results, folder: Path) -> str:
    """Tables in Markdown; the figure is written to `folder`."""
    draw(results, folder / "perplexity.svg")
    size = [
        Column("parameters", "parameters", "{:,.0f}"),
        Column("attention, kFLOPs per token", "attention_flops", "{:.0f}", scale=1e-3),
    ]
    perplexity = Column("perplexity", "perplexity", "{:.2f}", paired=True)
    bleu = Column("BLEU", "bleu", "{:.2f}", paired=True)
    names = list(VARIANTS["masked"])
    scaling, ablation = names[: 1 + len(EXPERTS)], ["MoA 8 of 32", *names[1 + len(EXPERTS) :]]
    common = {"task": "masked", "steps": STEPS["masked"]}
    parts = [
        "### Masked language models",
        variant_table(results, scaling, [*size, perplexity, LOAD_MAX], **common),
        "### Without the routers' losses",
        variant_table(results, ablation, [perplexity, LOAD_MAX, LOAD_CV, UNUSED], **common),
        time_and_machine(results, task="masked"),
        "### Translation",
        variant_table(
            results,
            VARIANTS["translation"],
            [*size, bleu, Column("test loss", "loss", "{:.3f}", paired=True), LOAD_MAX],
            task="translation",
            steps=STEPS["translation"],
        ),
        time_and_machine(results, task="translation"),
    ]
    return "\n\n".join(parts)


def draw(results: Results, path: Path) -> None:
    """Perplexity against the number of experts."""
    figure, [axis] = panels(1)
    find = {"task": "masked", "steps": STEPS["masked"]}
    points = [
        (n, list(by_seed(results, "perplexity", variant=f"MoA 8 of {n}", **find).values()))
        for n in EXPERTS
    ]
    base = list(by_seed(results, "perplexity", variant="MHA", **find).values())
    draw_line(axis, [(n, base) for n in EXPERTS], 0, label="MHA of equal compute")
    draw_line(axis, points, 1, label="MoA, 8 active heads")
    axis.set_xscale("log", base=2)
    axis.set_xticks(EXPERTS, map(str, EXPERTS))
    axis.set_xlabel("attention experts")
    axis.set_ylabel("perplexity of masked tokens")
    save(figure, [axis], path)


EXPERIMENT = Experiment(
    name="moa_scaling",
    description=__doc__,
    phases=(Phase("training", runs, measure),),
    report=report,
    needed={},
    optional=DATA_DIR | WORK_DIR,
    plan=lambda: [MASKED, FLAGS, VARIANTS],
)

if __name__ == "__main__":
    EXPERIMENT.main()
