"""How a new MoA starts: the scale of its output projections, and of all weights, on WikiText-2.

    python examples/reproduce/moa_start.py --data_dir data

Zhang et al. 2022 do not say how MoA's weights are drawn. Masked language models, as those of
`moa_scaling.py` but for fewer updates: 8 active heads of 32 whose Wo start 8 times as large as the
output projection of multi-head attention (hf_moa's own), or as large as it; and both kinds of attention
with an `initializer_range` of 0.08 and of BERT's 0.02. Perplexity of masked tokens. The report:

    python examples/reproduce/moa_start.py --report model_cards/moa_start
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
from moa_scaling import MASKED, MHA, bert_moa
from runs import Results, Settings, each_seed, run_arguments
from scripts import Flags, merged
from summaries import Column, time_and_machine, variant_table
from wikitext_runs import train_on_wikitext

SEEDS = (1, 2, 3)
STEPS = 2_000
LEARNING_RATE = 2e-3
SMALL_START: Flags = {"config_overrides": {"initializer_range": 0.02}}

VARIANTS: dict[str, Flags] = {
    "MHA": MHA,
    "MHA, initializer_range 0.02": merged(MHA, SMALL_START),
    "MoA 8 of 32": bert_moa(32),
    "MoA 8 of 32, initializer_range 0.02": merged(bert_moa(32), SMALL_START),
    "MoA 8 of 32, Wo as in MHA": bert_moa(32),
}


def runs(results: Results) -> list[Settings]:
    return each_seed(SEEDS, VARIANTS, STEPS)


def measure(settings: Settings, options: argparse.Namespace) -> dict:
    flags = merged(MASKED, VARIANTS[settings["variant"]]) | {"learning_rate": LEARNING_RATE}
    start = smaller_output_projections if "Wo as in MHA" in settings["variant"] else nullcontext
    with tempfile.TemporaryDirectory() as folder, start():
        found = train_on_wikitext(
            "run_mlm_no_trainer",
            "wikitext-2",
            flags,
            folder=folder,
            **run_arguments(settings, options),
        )
    return {"perplexity": found["perplexity"], "loss": found["eval_loss"]}


@contextmanager
def smaller_output_projections() -> Iterator[None]:
    """Models that are built in this context start with Wo of the backbone's scale."""
    from hf_moa.modeling.core.gated_model import GatedModel
    from hf_moa.modeling.moa.projections import ExpertOutput

    init_weights = GatedModel._init_weights

    def scaled_down(self, module):
        init_weights(self, module)
        if isinstance(module, ExpertOutput):
            module.weight.data /= self.config.num_attention_heads

    with mock.patch.object(GatedModel, "_init_weights", scaled_down):
        yield


def report(results: Results, folder: Path) -> str:
    """The table in Markdown; the figure is written to `folder`."""
    columns = [Column("perplexity", "perplexity", "{:.1f}", paired=True)]
    draw_variants(results, VARIANTS, [Panel(each) for each in columns], folder / "perplexity.svg")
    return f"{variant_table(results, VARIANTS, columns)}\n\n{time_and_machine(results)}"


EXPERIMENT = Experiment(
    name="moa_start",
    description=__doc__,
    phases=(Phase("training", runs, measure),),
    report=report,
    needed={},
    optional=DATA_DIR | WORK_DIR,
    plan=lambda: [MASKED, LEARNING_RATE, VARIANTS],
)

if __name__ == "__main__":
    EXPERIMENT.main()
