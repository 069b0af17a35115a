"""MoA: more experts at constant compute. Zhang et al. 2022, on WikiText and Multi30k.

    python examples/reproduce/moa_scaling.py --data_dir data

- masked language models of WikiText-2, and of the beginning of WikiText-103, with 8 active heads of 8,
  16, 32 and 64, against multi-head attention of as many multiply-accumulates: perplexity of masked
  tokens;
- some of those of WikiText-2 for three times the updates, and some with four times the batch;
- why N matters as it does, on WikiText-2: 8 of 8 with equal weights instead of the router's, which
  is multi-query attention, and 32 of 32, which computes what 8 of 32 chooses from;
- 8 of 32 on WikiText-2 without the balance loss, without the z loss, and without both: expert load;
- translation of Multi30k: multi-head attention against MoA with 8 active heads of 8 and of 16 (8K8E,
  8K16E).

MoA's heads are larger than those of multi-head attention, and smaller the more its routers compute, so
that attention computes as much (`attention_flops` per token, at the length of the texts). The learning
rates of both kinds of attention are chosen first, on the validation text and with a seed that the report
leaves out; two variants that take over another's are tried at all of them too. A run that was stopped
goes on where it was. The report:

    python examples/reproduce/moa_scaling.py --report model_cards/moa_scaling
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest import mock

from experiment import DATA_DIR, WORK_DIR, Experiment, Phase
from figures import draw_line, panels, save
from gate_measures import LOAD_CV, LOAD_MAX, UNUSED, balance, tables_of
from runs import Results, Settings, read_json_lines, run_arguments
from scipy.stats import spearmanr
from scripts import Flags, merged
from summaries import Column, best_rate, by_seed, time_and_machine, variant_table
from translation_runs import FLAGS, train_translation
from wikitext_runs import LENGTH, SMALL_BERT, train_on_wikitext

from hf_moa.cli.command import load_checkpoint

SEEDS = (1, 2, 3)
EXPERTS = (8, 16, 32, 64)
STEPS = {"wikitext-2": 6_000, "wikitext-103": 6_000, "multi30k": 1_500}  # by corpus
MORE_OF = "wikitext-2"
# to see whether the later start of many experts is all that holds them back
LONGER, LONG_STEPS = ("MoA 8 of 8", "MoA 8 of 32"), 18_000
# four times the tokens of an update: an expert of 32 sees as many as one of 8 does elsewhere
LARGER, LARGE_STEPS, LARGE_BATCH = ("MoA 8 of 8", "MoA 8 of 32"), 3_000, 128
TUNING = {"text": "validation", "seed": 0}
SENTENCE_LENGTH = 16  # tokens, of Multi30k on average
# training loss of a masked model that attends: token frequencies alone give above 6
ATTENDS_BELOW = 5.5
LAST_LOGS = 4  # of 50 updates each, for the training loss in the end

MHA: Flags = {"attention_type": "mha"}
HEAD_SIZES = {8: 26, 16: 25, 32: 25, 64: 23}  # of BERT


def moa(num_experts: int, **overrides: float) -> Flags:
    """MoA with 8 active heads, and these fields of the config."""
    return {
        "attention_type": "moa",
        "num_attention_experts": num_experts,
        "config_overrides": overrides,
    }


def bert_moa(num_experts: int, **losses: float) -> Flags:
    """The same of BERT, with these coefficients of the routers' losses, where not the defaults."""
    coefficients = {f"router_{name}_loss_coef": value for name, value in losses.items()}
    return moa(num_experts, head_dim=HEAD_SIZES[num_experts], **coefficients)


SCALING = {**{f"MoA 8 of {n}": bert_moa(n) for n in EXPERTS}, "MHA": MHA}
WITHOUT_LOSSES = {
    "MoA 8 of 32, no balance loss": bert_moa(32, balance=0),
    "MoA 8 of 32, no z loss": bert_moa(32, z=0),
    "MoA 8 of 32, neither": bert_moa(32, balance=0, z=0),
}
MULTI_QUERY = "MoA 8 of 8, equal weights"
CAUSES = {
    MULTI_QUERY: bert_moa(8),
    "MoA 32 of 32": merged(bert_moa(32), {"config_overrides": {"num_attention_heads": 32}}),
}
TRANSLATION = {"MHA": MHA, "MoA 8K8E": moa(8, d_kv=27), "MoA 8K16E": moa(16, d_kv=27)}
VARIANTS: dict[str, dict[str, Flags]] = {
    "wikitext-2": SCALING | WITHOUT_LOSSES | CAUSES,
    "wikitext-103": SCALING,
    "multi30k": TRANSLATION,
}
OF_MASKED = ("wikitext-2", "wikitext-103")  # corpora
# corpus -> learning rates to choose from, and with which variants: others have the last one's
# and WikiText-103 has WikiText-2's
RATES: dict[str, tuple[tuple[float, ...], tuple[str, ...]]] = {
    "wikitext-2": ((1e-3, 2e-3, 4e-3, 8e-3), ("MHA", "MoA 8 of 32")),
    "multi30k": ((1e-2, 3e-2, 6e-2, 1e-1), ("MHA", "MoA 8K8E", "MoA 8K16E")),
}
# variants that are tried at the same rates, to see whether they would have wanted another
CHECKED = {"wikitext-2": ("MoA 8 of 64", "MoA 32 of 32")}
# few layers and small batches, for many updates: each expert learns from only a share of the tokens
MASKED: Flags = merged(
    SMALL_BERT,
    {"config_overrides": {"num_hidden_layers": 2}, "per_device_train_batch_size": 32},
)


def tuning_runs(results: Results) -> list[Settings]:
    return [
        {
            "corpus": corpus,
            "variant": variant,
            "learning_rate": rate,
            "steps": STEPS[corpus],
            **TUNING,
        }
        for corpus, (rates, variants) in RATES.items()
        for variant in (*variants, *CHECKED.get(corpus, ()))
        for rate in rates
    ]


def final_runs(results: Results) -> list[Settings]:
    made: list[Settings] = [
        {"corpus": corpus, "variant": variant, "steps": STEPS[corpus]}
        for corpus, variants in VARIANTS.items()
        for variant in variants
    ]
    more = {"corpus": MORE_OF}
    made += [{**more, "variant": v, "steps": LONG_STEPS} for v in LONGER]
    made += [{**more, "variant": v, "steps": LARGE_STEPS, "batch": LARGE_BATCH} for v in LARGER]
    for run in made:
        run["learning_rate"] = chosen_rate(results, run["corpus"], run["variant"])
    return [{**run, "seed": seed} for seed in SEEDS for run in made]


def chosen_rate(results: Results, corpus: str, variant: str) -> float:
    """That with the smallest validation loss among the tuning runs of this kind of attention."""
    corpus = corpus if corpus in RATES else OF_MASKED[0]
    _, variants = RATES[corpus]
    tuned = variant if variant in variants else variants[-1]
    return best_rate(results, "loss", smallest=True, corpus=corpus, variant=tuned, **TUNING)


def measure(settings: Settings, options: argparse.Namespace) -> dict:
    """One training run, and the expert load on the text that it is evaluated on."""
    train = translation if settings["corpus"] == "multi30k" else masked
    flags = VARIANTS[settings["corpus"]][settings["variant"]]
    run = {**run_arguments(settings, options), "text": settings.get("text", "test")}
    routers = equal_weights() if settings["variant"] == MULTI_QUERY else nullcontext()
    with routers, tempfile.TemporaryDirectory() as folder:
        flags = {**flags, "learning_rate": settings["learning_rate"]}
        if "batch" in settings:
            flags["per_device_train_batch_size"] = settings["batch"]
        found = train(settings["corpus"], flags, folder, run)
        curve = [log["loss"] for log in read_json_lines(Path(folder, "log.jsonl")) if "loss" in log]
    return found | {"curve": [round(loss, 3) for loss in curve]}


@contextmanager
def equal_weights() -> Iterator[None]:
    """Routers give all experts the same weight, in training and after it."""
    from hf_moa.modeling.routing.routers import TopKRouter

    def forward(self, hidden_states, padding_mask=None):
        return self.select(0 * self.gate(hidden_states).float(), padding_mask)

    with mock.patch.object(TopKRouter, "forward", forward):
        yield


def masked(corpus: str, flags: Flags, folder: str, run: dict[str, Any]) -> dict:
    flags = merged(MASKED, flags)
    found = train_on_wikitext("run_mlm_no_trainer", corpus, flags, folder=folder, **run)
    facts = model_facts(folder, found["files"][run["text"]])
    return {"perplexity": found["perplexity"], "loss": found["eval_loss"], **facts}


def translation(corpus: str, flags: Flags, folder: str, run: dict[str, Any]) -> dict:
    found = train_translation(corpus, flags, folder=folder, **run)
    source, target = (found["files"][f"{run['text']}_{side}"] for side in ("source", "target"))
    facts = model_facts(folder, source, target)
    return {"bleu": found["bleu"], "loss": found["eval_loss"], **facts}


def model_facts(folder: str, text: str, target: str | None = None) -> dict[str, Any]:
    """Size, operations of attention per token, and the experts' load on the first lines."""
    from hf_moa.flops import count_flops

    model = load_checkpoint(folder)
    length = LENGTH if target is None else SENTENCE_LENGTH
    flops = count_flops(model, *([length] if target is None else [length, length]))
    attention = sum(part.active for part in flops.parts if part.part.endswith("attention"))
    facts = {"parameters": model.num_parameters(), "attention_flops": attention / length}
    if model.config.attention_type == "moa":
        tables = tables_of(model, folder, text, target=target, limit=1_000)
        facts |= {**balance(tables), "router_entropy": tables["router_entropy"]["entropy"].mean()}
    return facts


def report(results: Results, folder: Path) -> str:
    """Tables in Markdown; the figure is written to `folder`."""
    draw(results, folder / "perplexity.svg")
    for row in results.rows:
        row["measured"]["attends_after"] = attends_after(row)
        row["measured"]["last_losses"] = fmean(row["measured"]["curve"][-LAST_LOGS:])
    size = [
        Column("parameters", "parameters", "{:,.0f}"),
        Column("attention, kFLOPs per token", "attention_flops", "{:.0f}", scale=1e-3),
    ]
    perplexity = Column("perplexity", "perplexity", "{:.2f}", paired=True)
    start = Column(f"updates to a training loss of {ATTENDS_BELOW}", "attends_after", "{:,.0f}")
    fit = Column("training loss in the end", "last_losses", "{:.2f}")
    bleu = Column("BLEU", "bleu", "{:.2f}", paired=True)
    parts = []
    for corpus in OF_MASKED:
        parts += [
            f"### Masked language models of {corpus}",
            table_of(results, corpus, SCALING, [*size, perplexity, start, LOAD_MAX]),
            correlation(results, corpus),
            time_and_machine(results, corpus=corpus),
        ]
    parts += [
        f"### {LONG_STEPS:,} updates ({MORE_OF})",
        table_of(results, MORE_OF, LONGER, [perplexity, fit, start, LOAD_MAX], steps=LONG_STEPS),
        f"### {LARGE_STEPS:,} updates of {LARGE_BATCH} rows ({MORE_OF})",
        table_of(results, MORE_OF, LARGER, [perplexity, start, LOAD_MAX], steps=LARGE_STEPS),
    ]
    loads = [LOAD_MAX, LOAD_CV, UNUSED, Column("router entropy", "router_entropy", "{:.2f}")]
    ablation = ["MoA 8 of 32", *WITHOUT_LOSSES]
    loss = Column("test loss", "loss", "{:.3f}", paired=True)
    parts += [
        "### One head of keys and values, and more of queries (wikitext-2)",
        table_of(results, "wikitext-2", ["MoA 8 of 8", *CAUSES, "MHA"], [*size, perplexity, start]),
        "### Without the routers' losses (wikitext-2)",
        table_of(results, "wikitext-2", ablation, [perplexity, start, *loads]),
        "### Translation (multi30k)",
        table_of(results, "multi30k", TRANSLATION, [*size, bleu, loss, LOAD_MAX]),
        time_and_machine(results, corpus="multi30k"),
    ]
    return "\n\n".join(filter(None, parts))


def attends_after(row: dict) -> float | None:
    """Updates until the training loss was below `ATTENDS_BELOW`; None where it never was."""
    curve = row["measured"]["curve"]
    logged = next((i for i, loss in enumerate(curve, start=1) if loss < ATTENDS_BELOW), None)
    return None if logged is None else logged * row["settings"]["steps"] / len(curve)


def correlation(results: Results, corpus: str) -> str:
    """How well the start of attention tells the perplexity, over all runs of a corpus."""
    runs = results.find(corpus=corpus, steps=STEPS[corpus], text=None)
    pairs = [(run["measured"]["attends_after"], run["measured"]["perplexity"]) for run in runs]
    pairs = [pair for pair in pairs if None not in pair]
    if len(pairs) < 3:
        return ""
    rank = spearmanr(*zip(*pairs, strict=True)).statistic
    return f"Rank correlation of these updates and perplexity over all {len(pairs)} runs: {rank:.2f}."


def table_of(
    results: Results,
    corpus: str,
    variants: Iterable[str],
    columns: Sequence[Column],
    steps: int | None = None,
) -> str:
    steps = STEPS[corpus] if steps is None else steps
    return variant_table(results, variants, columns, corpus=corpus, steps=steps, text=None)


def draw(results: Results, path: Path) -> None:
    """Perplexity against the number of experts."""
    figure, axes = panels(len(OF_MASKED))
    for axis, corpus in zip(axes, OF_MASKED, strict=True):
        find = partial(by_seed, results, "perplexity", corpus=corpus, steps=STEPS[corpus], text=None)
        base = list(find(variant="MHA").values())
        points = [(n, list(find(variant=f"MoA 8 of {n}").values())) for n in EXPERTS]
        draw_line(axis, [(n, base) for n in EXPERTS], 0, label="MHA of equal compute")
        draw_line(axis, points, 1, label="MoA, 8 active heads")
        axis.set_title(corpus)
        axis.set_xscale("log", base=2)
        axis.set_xticks(EXPERTS, map(str, EXPERTS))
        axis.set_xlabel("attention experts")
        axis.set_ylabel("perplexity of masked tokens")
    save(figure, axes, path)


EXPERIMENT = Experiment(
    name="moa_scaling",
    description=__doc__,
    phases=(Phase("rates", tuning_runs, measure), Phase("training", final_runs, measure)),
    report=report,
    needed={},
    optional=DATA_DIR | WORK_DIR,
    plan=lambda: [MASKED, FLAGS, VARIANTS],
)

if __name__ == "__main__":
    EXPERIMENT.main()
