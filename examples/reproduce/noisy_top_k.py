"""Noisy top-k routing: what the noise, the importance loss and the load loss do. Shazeer et al. 2017,
appendix A, table 6, on WikiText-2.

    python examples/reproduce/noisy_top_k.py --data_dir data

A small GPT-2 whose feed-forward layers are 16 experts of which 2 are active: with and without the noise,
with and without the two losses (of the paper's weights: 0.2 alone; 0.1, 0.01 and 1 together). The load
loss needs the noise. Beside these stands a model without experts that computes as much: its layers are
as wide as the 2 active ones together. Test perplexity, and how evenly the test tokens, which are routed
without noise, are spread over the experts. Three of the variants again, for three times the updates; and
some once more, with one seed, to see how sure their routers are, and how large the noise. A run that was
stopped goes on where it was. The report:

    python examples/reproduce/noisy_top_k.py --report model_cards/noisy_top_k
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from corpora import read_lines
from experiment import DATA_DIR, WORK_DIR, Experiment, Phase
from figures import Panel, draw_variants
from gate_measures import LOAD_CV, LOAD_MAX, UNUSED, balance, tables_of
from runs import Results, Settings, each_seed, run_arguments
from scripts import Flags, merged
from summaries import Column, by_seed, time_and_machine, variant_table, with_deviation
from wikitext_runs import train_on_wikitext

from hf_moa.cli.command import load_checkpoint
from hf_moa.markdown import table

SEEDS = (1, 2, 3)
STEPS, LONG_STEPS = 1_200, 3_600
NUM_ACTIVE, WIDTH = 2, 256  # experts of a token, and each one's hidden layer


def experts(router_type: str, **losses: float) -> Flags:
    """Experts with this router and these of its losses, and no other."""
    none = {"balance": 0, "z": 0, "importance": 0, "load": 0}
    coefficients = {f"router_{name}_loss_coef": value for name, value in {**none, **losses}.items()}
    return {
        "ffn_type": "moe",
        "num_ffn_experts": 16,
        "num_ffn_experts_per_token": NUM_ACTIVE,
        "router_type": router_type,
        "config_overrides": {"n_inner": WIDTH, **coefficients},
    }


VARIANTS: dict[str, Flags] = {
    "noise, both losses": experts("noisy_topk", importance=0.1, load=0.1),
    "noise, both losses, weight 0.01": experts("noisy_topk", importance=0.01, load=0.01),
    "noise, both losses, weight 1": experts("noisy_topk", importance=1, load=1),
    "noise, importance loss": experts("noisy_topk", importance=0.2),
    "noise, load loss": experts("noisy_topk", load=0.2),
    "noise alone": experts("noisy_topk"),
    "importance loss alone": experts("topk", importance=0.2),
    "nothing": experts("topk"),
    "no experts": {"config_overrides": {"n_inner": NUM_ACTIVE * WIDTH}},
}
LONGER = ("noise, both losses", "importance loss alone", "nothing")
# variants whose routers are looked at, and their updates
LOOKED_AT = (
    ("noise alone", STEPS),
    ("noise, both losses, weight 0.01", STEPS),
    ("noise, both losses", STEPS),
    ("noise, both losses", LONG_STEPS),
    ("importance loss alone", STEPS),
)
LOOKED_AT_TEXT = 60_000  # characters
FLAGS: Flags = {
    "model_type": "moa_gpt2",
    "vocab_size": 4096,
    "attention_type": "mha",
    "config_overrides": {
        "n_layer": 2,
        "n_embd": 128,
        "n_head": 4,
        "n_positions": 128,
        "resid_pdrop": 0,
        "embd_pdrop": 0,
        "attn_pdrop": 0,
    },
    "learning_rate": 2e-3,
    "num_warmup_steps": 100,
    "lr_scheduler_type": "cosine",
    "per_device_train_batch_size": 16,
    "per_device_eval_batch_size": 64,
}


def runs(results: Results) -> list[Settings]:
    return each_seed(SEEDS, VARIANTS, STEPS)


def longer_runs(results: Results) -> list[Settings]:
    return each_seed(SEEDS, LONGER, LONG_STEPS)


def router_runs(results: Results) -> list[Settings]:
    return [{"routers_of": variant, "steps": steps, "seed": SEEDS[0]} for variant, steps in LOOKED_AT]


def train(variant: str, settings: Settings, options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """One run of `examples/run_clm_no_trainer.py`."""
    return train_on_wikitext(
        "run_clm_no_trainer",
        "wikitext-2",
        merged(FLAGS, VARIANTS[variant]),
        folder=folder,
        **run_arguments(settings, options),
    )


def measure(settings: Settings, options: argparse.Namespace) -> dict:
    """A run's perplexity, and the expert load on the test text."""
    with tempfile.TemporaryDirectory() as folder:
        found = train(settings["variant"], settings, options, folder)
        model = load_checkpoint(folder)
        measured = {"perplexity": found["perplexity"], "parameters": model.num_parameters()}
        if model.config.ffn_type == "moe":
            measured |= balance(tables_of(model, folder, found["files"]["test"], limit=1_000))
    return measured


def measure_routers(settings: Settings, options: argparse.Namespace) -> dict[str, float]:
    """A run's routers, on the beginning of the test text; means over its tokens.

    Returns:
        By layer: `spread`, the standard deviation of a token's logits over the experts, without noise;
        `gap`, between the last logit that is kept and the next; `noise`, its standard deviation.
    """
    import torch
    from torch.nn.functional import softplus
    from transformers import AutoTokenizer

    from hf_moa.modeling.routing.routers import NoisyTopKRouter, TopKRouter

    measured: dict[str, float] = {}

    def look(layer: int, router: TopKRouter, args: tuple) -> None:
        logits = router.gate(args[0])
        best = logits.topk(NUM_ACTIVE + 1).values
        found = {"spread": logits.std(-1), "gap": best[..., -2] - best[..., -1]}
        if isinstance(router, NoisyTopKRouter):
            found["noise"] = softplus(router.noise(args[0]))
        measured.update({f"{name} {layer}": value.mean().item() for name, value in found.items()})

    with tempfile.TemporaryDirectory() as folder:
        files = train(settings["routers_of"], settings, options, folder)["files"]
        model, tokenizer = load_checkpoint(folder).eval(), AutoTokenizer.from_pretrained(folder)
    routers = [module for module in model.modules() if isinstance(module, TopKRouter)]
    for layer, router in enumerate(routers, start=1):
        router.register_forward_pre_hook(partial(look, layer))
    text = "\n".join(read_lines(files["test"]))[:LOOKED_AT_TEXT]
    ids, length = tokenizer(text, return_tensors="pt").input_ids[0], model.config.n_positions
    with torch.no_grad():
        model(ids[: len(ids) // length * length].view(-1, length))
    return measured


def report(results: Results, folder: Path) -> str:
    """Tables in Markdown; the figure is written to `folder`."""
    perplexity = Column("perplexity", "perplexity", "{:.2f}", paired=True)
    columns = [Column("parameters", "parameters", "{:,.0f}"), perplexity, LOAD_CV, LOAD_MAX, UNUSED]
    measures = [
        Panel(column, f"{steps:,} updates", {"steps": steps})
        for steps in (STEPS, LONG_STEPS)
        for column in (perplexity, LOAD_CV)
    ]
    draw_variants(results, VARIANTS, measures, folder / "load.svg")
    return "\n\n".join(
        [
            variant_table(results, VARIANTS, columns, steps=STEPS),
            f"{LONG_STEPS:,} updates:",
            variant_table(results, LONGER, columns, steps=LONG_STEPS),
            time_and_machine(results, routers_of=None),
            "Routers:",
            router_table(results),
            time_and_machine(results, variant=None),
        ]
    )


def router_table(results: Results) -> str:
    """Spread, gap and noise of each layer's router."""
    layers = range(1, FLAGS["config_overrides"]["n_layer"] + 1)
    names = ("spread", "gap", "noise")
    rows = []
    for variant, steps in LOOKED_AT:
        cells = []
        for layer in layers:
            find = partial(by_seed, results, routers_of=variant, steps=steps)
            shown = (with_deviation(find(f"{name} {layer}").values(), "{:.2f}") for name in names)
            cells.append(", ".join(shown))
        rows.append([variant, f"{steps:,}", *cells])
    heads = [f"layer {layer}: {', '.join(names)}" for layer in layers]
    return table(["variant", "updates", *heads], rows)


EXPERIMENT = Experiment(
    name="noisy_top_k",
    description=__doc__,
    phases=(
        Phase("training", runs, measure),
        Phase("longer", longer_runs, measure, independent=True),
        Phase("routers", router_runs, measure_routers, independent=True),
    ),
    report=report,
    needed={},
    optional=DATA_DIR | WORK_DIR,
    plan=lambda: [FLAGS, VARIANTS],
)

if __name__ == "__main__":
    EXPERIMENT.main()
