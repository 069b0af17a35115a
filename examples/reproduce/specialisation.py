"""Do MAE's experts specialise? Peng et al. 2020, section 5.1, on the models of mae_translation.py.

    python examples/reproduce/specialisation.py --data_dir data --models_dir runs/mae_translation

On the test text: the gates' entropy, how many inputs are attributed to each expert, which tokens go with
an expert, and what BLEU is left when every layer takes only one expert, that of the largest gate or a
random one (greedy search). The report:

    python examples/reproduce/specialisation.py --report model_cards/specialisation
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import mae_translation
from experiment import TATOEBA_DIR, Experiment, Phase
from figures import Panel, draw_variants
from gate_measures import mae_gates, tables_of
from runs import Results, Settings
from summaries import Column, time_and_machine, variant_table
from translation_runs import CORPORA, SIZE, Translator

from hf_moa.cli.command import load_checkpoint
from hf_moa.markdown import table

HEADS = SIZE["num_heads"]
# heads that an expert drops -> the variants with such experts
VARIANTS = {
    dropped: [
        name
        for name, flags in mae_translation.VARIANTS.items()
        if flags["attention_type"] == "mae" and flags.get("mae_num_dropped_heads", 1) == dropped
    ]
    for dropped in (1, 2)
}
SHOWN = {"seed": mae_translation.SEEDS[0]}  # whose attribution and tokens the report shows
PARTS = {"encoder": "encoder", "decoder": "decoder", "cross": "cross-attention"}
TOKENS = 8  # of each expert


def runs(results: Results) -> list[Settings]:
    variants = {name for names in VARIANTS.values() for name in names}
    return [run for run in mae_translation.runs(results) if run["variant"] in variants]


def measure(settings: Settings, options: argparse.Namespace) -> dict:
    """Entropies, attribution and indicative tokens, and BLEU with one expert per layer."""
    import torch

    from hf_moa.analysis import expert_selection

    torch.manual_seed(settings["seed"])  # of the experts that are drawn
    files = CORPORA[settings["corpus"]](options.data_dir, options.models_dir)
    folder = mae_translation.trained_model(settings, options)
    model = load_checkpoint(str(folder))
    tables = tables_of(model, folder, files["test_source"], target=files["test_target"])
    measured: dict[str, Any] = mae_gates(tables)
    for part in PARTS:
        measured |= {
            f"{part} {name}": value for name, value in mae_gates(_of_part(tables, part)).items()
        }
    translator = Translator(folder, files["test_source"], files["test_target"])
    for row in expert_selection(model, lambda: {"bleu": translator.bleu(model)}).to_dict("records"):
        measured[f"bleu {row['experts']}"] = row["bleu"]
    for selection in ("argmax", "random"):
        measured[f"drop {selection}"] = measured["bleu mixture"] - measured[f"bleu {selection}"]
    measured["layers"] = layers(tables)
    return measured


def _of_part(tables: dict[str, Any], part: str) -> dict[str, Any]:
    return {name: table[table["part"].str.startswith(part)] for name, table in tables.items()}


def layers(tables: dict[str, Any]) -> list[dict[str, Any]]:
    """Of each layer: the share of the inputs, and the most indicative tokens, of each expert."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for row in tables["mae_experts"].to_dict("records"):
        place = row["part"], row["layer"]
        layer = found.setdefault(
            place, {"part": place[0], "layer": place[1], "shares": [], "tokens": []}
        )
        layer["shares"].append(row["share"])  # in the order of the experts
        layer["tokens"].append([])
    for row in tables["mae_indicative_tokens"].to_dict("records"):
        tokens = found[row["part"], row["layer"]]["tokens"][row["expert"]]
        if len(tokens) < TOKENS:
            tokens.append(row["token"])
    return list(found.values())


def report(results: Results, folder: Path) -> str:
    """Tables in Markdown; a figure for each corpus and size of experts is written to `folder`."""
    parts = []
    for corpus in CORPORA:
        parts.append(f"### {corpus}")
        for dropped, variants in VARIANTS.items():
            if not any(results.find(corpus=corpus, variant=each) for each in variants):
                continue
            experts = math.comb(HEADS, dropped)
            entropy, drops, columns = measures_of(experts)
            panels = [Panel(each, settings={"corpus": corpus}) for each in (entropy, *drops)]
            draw_variants(results, variants, panels, folder / f"{corpus}_{HEADS - dropped}_heads.svg")
            table_of_variants = variant_table(results, variants, columns, corpus=corpus)
            parts += [f"{experts} experts of {HEADS - dropped} heads:", table_of_variants]
        for variant in VARIANTS[1]:
            rows = results.find(corpus=corpus, variant=variant, **SHOWN)
            if rows and "UNI" not in variant:
                parts += [f"{variant}, seed {SHOWN['seed']}:", attribution(rows[0]["measured"])]
    return "\n\n".join([*parts, time_and_machine(results)])


def measures_of(experts: int) -> tuple[Column, list[Column], list[Column]]:
    """The entropy, what single experts lose, and the columns of a table of these and more."""
    entropy = Column(f"entropy (uniform: {math.log(experts):.3f})", "entropy", "{:.3f}")
    drops = [
        Column("drop with the expert of the largest gate", "drop argmax", "{:.2f}"),
        Column("drop with a random one", "drop random", "{:.2f}"),
    ]
    columns = [
        entropy,
        *(Column(f"entropy, {name}", f"{part} entropy", "{:.3f}") for part, name in PARTS.items()),
        Column("inputs of the most used expert", "largest_share", "{:.0%}"),
        Column("BLEU", "bleu mixture", "{:.2f}"),
        *drops,
    ]
    return entropy, drops, columns


def attribution(measured: dict[str, Any]) -> str:
    """The share of the inputs of each expert, and the tokens that go with the most used one."""
    rows = []
    for layer in measured["layers"]:
        shares = layer["shares"]
        words = ", ".join(layer["tokens"][shares.index(max(shares))])
        percent = ", ".join(f"{100 * share:.0f}" for share in shares)
        rows.append([layer["part"], layer["layer"] + 1, percent, words])
    return table(
        ["part", "layer", "inputs of each expert (%)", "tokens of the expert with most of them"], rows
    )


EXPERIMENT = Experiment(
    name="specialisation",
    description=__doc__,
    phases=(Phase("measuring", runs, measure),),
    report=report,
    needed=TATOEBA_DIR | {"models_dir": "of mae_translation.py; those that it lacks are trained"},
    plan=mae_translation.EXPERIMENT.plan,
)

if __name__ == "__main__":
    EXPERIMENT.main()
