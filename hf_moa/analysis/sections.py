"""What a report says of each table: title, explanation, figure, and what it prints of the numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import pandas as pd

from . import plots

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# Stands around what is to look like code.
CODE = "\0"


@dataclass(frozen=True)
class Section:
    """What a report says of one table.

    Attributes:
        table: its name; the section stands where the analysis has it.
        title: of the section.
        text: what is measured, and how to read it.
        plot: table -> figure, or None.
        shorten: table -> what the report prints of it, or None for nothing but the figure.
    """

    table: str
    title: str
    text: str
    plot: Callable[[pd.DataFrame], Figure] | None = None
    shorten: Callable[[pd.DataFrame], pd.DataFrame] | None = None


def _whole(table: pd.DataFrame) -> pd.DataFrame:
    """All of a short table, beside its figure."""
    return table


def _entropies(table: pd.DataFrame) -> pd.DataFrame:
    """With a mean over all layers."""
    mean = {"part": "all", "layer": "mean"}
    mean |= {name: table[name].mean() for name in ("entropy", "uniform")}
    rows = [*table.to_dict(orient="records"), mean]
    return pd.DataFrame(rows, columns=table.columns, dtype=object).fillna("")


def _joined(table: pd.DataFrame, by: list[str], value: str) -> pd.DataFrame:
    """One row for each group: its tokens, each with a number behind it."""
    text = table["token"].map(f"{CODE}{{}}{CODE}".format) + table[value].map(" {:.2f}".format)
    named = table.assign(tokens=text)
    return named.groupby(by, sort=False)["tokens"].agg(", ".join).reset_index()


def _closest_pairs(table: pd.DataFrame) -> pd.DataFrame:
    """The experts that serve the same tokens most, beyond chance; of few tokens lift says little."""
    return table[table["tokens"] >= 10].nlargest(10, "lift")


SECTIONS = (
    Section(
        "budget_metrics",
        "Quality at each budget",
        "The model's metrics on the data's labels, at each compute budget.",
        plots.plot_budget_metrics,
        _whole,
    ),
    Section(
        "cct_compute",
        "Compute at each budget",
        "The share of the skippable computation that was carried out, a mean over sequences: how well "
        "the gates keep to the budget.",
    ),
    Section(
        "expert_selection",
        "One expert per layer",
        "Metrics with MAE's mixture of all experts; with the one that has the largest gate in each "
        "layer; with one at random (Peng et al. 2020, table 5). The more the gates have specialised "
        "the experts, the less “argmax” loses, and the more “random” does.",
        plots.plot_selection,
        _whole,
    ),
    Section(
        "mae_entropy",
        "MAE: entropy of the gates",
        "Mean over inputs of the entropy of the gate's distribution over experts. At the uniform value "
        "the gate has learned nothing; near zero it uses one expert.",
        plots.plot_entropies,
        _entropies,
    ),
    Section(
        "mae_experts",
        "MAE: inputs attributed to each expert",
        "Share of the inputs whose largest gate is each expert's (table 8), experts named by the heads "
        "that they drop. An input of a bidirectional layer is a sequence; of a causal one a position "
        "with what precedes it.",
        partial(plots.plot_shares, column="share", experts="drops heads"),
    ),
    Section(
        "mae_indicative_tokens",
        "MAE: tokens telling of an expert",
        "Tokens with the highest pointwise mutual information with each expert, in nats (table 6): how "
        "much more often than by chance their inputs go to it.",
        shorten=partial(_joined, by=["part", "layer", "expert"], value="pmi"),
    ),
    Section(
        "expert_load",
        "Load of the experts",
        "Share of the assignments that the router gives each expert. Even load is what the balance "
        "loss asks for; an expert at zero is dead.",
        partial(plots.plot_shares, column="load"),
    ),
    Section(
        "router_entropy",
        "Entropy of the routers",
        "Mean over tokens of the entropy of the router's distribution over all experts.",
        plots.plot_entropies,
        _entropies,
    ),
    Section(
        "experts_together",
        "Experts chosen together",
        "How much more often two experts serve the same token than if k experts were chosen by chance, "
        "each as often as it is (lift; 1 is chance), and the closest pairs. White: an expert with "
        "itself, or that serves no token.",
        plots.plot_pairs,
        _closest_pairs,
    ),
    Section(
        "expert_indicative_tokens",
        "MoA: tokens telling of an expert",
        "Tokens with the highest pointwise mutual information with each expert, in nats (Zhang et al. "
        "2022, section 6).",
        shorten=partial(_joined, by=["part", "layer", "expert"], value="pmi"),
    ),
    Section(
        "expert_kind_preferences",
        "Which experts kinds of tokens prefer",
        "Of the tokens of each kind, the share of their assignments that each expert gets.",
        partial(plots.plot_preferences, rows="kind"),
    ),
    Section(
        "expert_token_preferences",
        "Which experts frequent tokens prefer",
        "The same for the most frequent tokens.",
        partial(plots.plot_preferences, rows="token"),
    ),
    Section(
        "cct_distribution",
        "Compute over tokens",
        "How many tokens get what share of the full compute of their layers (Bapna et al. 2020, fig. "
        "9).",
        plots.plot_distribution,
    ),
    Section(
        "cct_frequency",
        "Compute and token frequency",
        "Mean share of compute of tokens by how often they occur in this data (fig. 10).",
        plots.plot_frequency,
    ),
    Section(
        "cct_token_compute",
        "Tokens with the most and the least compute",
        "Mean share of the full compute, behind each token.",
        shorten=partial(_joined, by=["budget", "stack", "which"], value="compute"),
    ),
    Section(
        "cct_activity",
        "Use of each sub-network",
        "Share of the tokens whose gate is open, by layer and sub-network, at each budget (fig. 11).",
        plots.plot_activity,
    ),
    Section(
        "cct_steps",
        "Use by decoding step",
        "Share of the decoder's gates that are open at each position, over all layers (figs. 12 and "
        "13).",
        plots.plot_steps,
    ),
)
