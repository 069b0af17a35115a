"""How MoA's routers start, and how much their auxiliary losses weigh, on WikiText-2.

    python examples/reproduce/moa_routers.py --data_dir data

The code that Zhang et al. 2022 published starts routers at zero, as the package does because of this,
and weighs their losses about 1e-4 of what the package does. Masked language models as those of
`moa_start.py`: routers that start as other linear layers do, or at zero; the balance loss weighed by
1e-2 or by 1e-6, the z loss by a tenth of that; 8 active heads of 8, and of 32. Perplexity of masked
tokens, and the shares of the experts in the assignments. The report:

    python examples/reproduce/moa_routers.py --report model_cards/moa_routers
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest import mock

from experiment import DATA_DIR, WORK_DIR, Experiment, Phase
from figures import Panel, draw_variants
from gate_measures import LOAD_MAX, UNUSED
from moa_scaling import MASKED, MHA, bert_moa, masked
from moa_start import LEARNING_RATE, SEEDS, STEPS
from runs import Results, Settings, each_seed, run_arguments
from scripts import Flags, merged
from summaries import Column, time_and_machine, variant_table

COEFFICIENTS = {"1e-2": 1e-2, "1e-6": 1e-6}
NORMAL = "normal"
STARTS = (NORMAL, "at zero")

OF_ALL: Flags = {"learning_rate": LEARNING_RATE, "mixed_precision": "no"}
VARIANTS: dict[str, Flags] = {
    "MHA": MHA,
    **{
        f"MoA 8 of {n}, routers {start}, losses {name}": bert_moa(n, balance=weight, z=weight / 10)
        for n in (8, 32)
        for start in STARTS
        for name, weight in COEFFICIENTS.items()
    },
}


def runs(results: Results) -> list[Settings]:
    return each_seed(SEEDS, VARIANTS, STEPS)


def measure(settings: Settings, options: argparse.Namespace) -> dict:
    flags = merged(VARIANTS[settings["variant"]], OF_ALL)
    start = routers_as_other_layers() if NORMAL in settings["variant"] else nullcontext()
    run = {**run_arguments(settings, options), "text": "test"}
    with start, tempfile.TemporaryDirectory() as folder:
        return masked("wikitext-2", flags, folder, run)


@contextmanager
def routers_as_other_layers() -> Iterator[None]:
    """Models that are built in this context have routers that start as other linear layers do."""
    from hf_moa.modeling.moa.mixture import MixtureOfAttentionExperts

    with mock.patch.object(MixtureOfAttentionExperts, "initialize", return_value=None):
        yield


def report(results: Results, folder: Path) -> str:
    """The table in Markdown; the figure is written to `folder`."""
    columns = [
        Column("perplexity", "perplexity", "{:.1f}", paired=True),
        LOAD_MAX,
        UNUSED,
        Column("router entropy", "router_entropy", "{:.2f}"),
    ]
    draw_variants(results, VARIANTS, [Panel(columns[0])], folder / "perplexity.svg")
    return f"{variant_table(results, VARIANTS, columns)}\n\n{time_and_machine(results)}"


EXPERIMENT = Experiment(
    name="moa_routers",
    description=__doc__,
    phases=(Phase("training", runs, measure),),
    report=report,
    needed={},
    optional=DATA_DIR | WORK_DIR,
    plan=lambda: [MASKED, OF_ALL, VARIANTS],
)

if __name__ == "__main__":
    EXPERIMENT.main()
