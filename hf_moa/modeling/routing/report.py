"""What a report says and shows of the experts that routers choose."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from hf_moa.analysis.drawing import figure_of_panels, heat_map, percent
from hf_moa.analysis.plots import plot_entropies, plot_shares
from hf_moa.analysis.sections import Section, joined, with_mean

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LIFTS = (0.25, 0.5, 1, 2, 4)  # named on the scale of pairs, which they span


def plot_pairs(table: pd.DataFrame, *, most_layers: int = 6) -> Figure:
    """`experts_together`: how much more often two experts serve the same token than by chance, in at
    most `most_layers` layers of each part, spread evenly.

    Lift is a ratio to chance, so all panels have one logarithmic scale with chance in its middle. It
    ends at four times and a quarter: a pair of rare experts can have a lift of 30, and what is usual
    would look all the same beside it.
    """
    panels = _layers_of_parts(table, most_layers)
    figure, axes = figure_of_panels(
        list(panels), width=2.9, height=2.6, most_columns=_columns(panels, 3)
    )
    from matplotlib.colors import LogNorm

    size = table["other"].max() + 1
    for (title, rows), axis in zip(panels.items(), axes, strict=True):
        lift = np.full((size, size), np.nan)
        for row in rows.itertuples():
            lift[row.expert, row.other] = lift[row.other, row.expert] = row.lift
        grid = pd.DataFrame(lift.clip(_LIFTS[0], _LIFTS[-1]))
        norm = LogNorm(_LIFTS[0], _LIFTS[-1])
        image = heat_map(axis, grid, norm=norm, columns=grid.columns, numbers=False)
        axis.set(title=title, xlabel="expert", ylabel="expert")
        axis.set_xticks(_few(size))
        axis.set_yticks(_few(size))
    bar = figure.colorbar(image, ax=axes, label="lift (1: chance)")
    names = [f"{lift:g}" for lift in _LIFTS]
    bar.set_ticks(_LIFTS, labels=[f"≤ {names[0]}", *names[1:-1], f"≥ {names[-1]}"])
    bar.minorticks_off()
    return figure


def plot_preferences(table: pd.DataFrame, *, rows: str, most_layers: int = 6) -> Figure:
    """`expert_kind_preferences` (`rows="kind"`) or `expert_token_preferences` (`"token"`): shares of the
    assignments by expert, in at most `most_layers` layers of each part, spread evenly."""
    panels = _layers_of_parts(table, most_layers)
    size = table["expert"].nunique()
    width = max(3.2, 0.3 * size + 1.2)
    figure, axes = figure_of_panels(
        list(panels),
        width=width,
        height=0.9 + 0.3 * max(own[rows].nunique() for own in panels.values()),
        most_columns=_columns(panels, max(1, int(13 // width))),
    )
    highest = table["share"].max()  # the same at best: a token goes to k experts
    for (title, own), axis in zip(panels.items(), axes, strict=True):
        names = own[rows].drop_duplicates()
        grid = own.pivot(index=rows, columns="expert", values="share").reindex(names)
        image = heat_map(axis, grid, highest=highest, columns=grid.columns, numbers=size <= 12)
        axis.set(title=title, xlabel="expert")
        axis.set_xticks(_few(size), [str(each) for each in _few(size)])
    figure.colorbar(image, ax=axes, label="share", format=percent())
    return figure


def _few(size: int) -> list[int]:
    """Numbers of some experts, where there are many."""
    return list(range(0, size, -(-size // 8)))


def _layers_of_parts(table: pd.DataFrame, most: int) -> dict[str, pd.DataFrame]:
    """A panel's title -> its rows: some layers of each part, spread evenly."""
    panels = {}
    for part, rows in table.groupby("part", sort=False):
        for layer in _spread(sorted(rows["layer"].unique()), most):
            panels[f"{part}, layer {layer}"] = rows[rows["layer"] == layer]
    return panels


def _columns(panels: dict[str, pd.DataFrame], most: int) -> int:
    """At most so many, and as even rows of each part as they allow."""
    parts = [title.rpartition(", layer ")[0] for title in panels]
    layers = parts.count(parts[0])
    return -(-layers // -(-layers // most))


def _spread(values: list[int], most: int) -> list[int]:
    if len(values) <= most:
        return values
    return [values[round(i * (len(values) - 1) / max(1, most - 1))] for i in range(most)]


def _closest_pairs(table: pd.DataFrame) -> pd.DataFrame:
    """The experts that serve the same tokens most, beyond chance; of few tokens lift says little."""
    return table[table["tokens"] >= 10].nlargest(10, "lift")


SECTIONS = (
    Section(
        "expert_load",
        "Load of the experts",
        "Share of the assignments that the router gives each expert. Even load is what the balance "
        "loss asks for; an expert at zero is dead.",
        partial(plot_shares, column="load"),
    ),
    Section(
        "router_entropy",
        "Entropy of the routers",
        "Mean over tokens of the entropy of the router's distribution over all experts.",
        plot_entropies,
        with_mean,
    ),
    Section(
        "experts_together",
        "Experts chosen together",
        "How much more often two experts serve the same token than if k experts were chosen by chance, "
        "each as often as it is (lift; 1 is chance), and the closest pairs. White: an expert with "
        "itself, or that serves no token.",
        plot_pairs,
        _closest_pairs,
    ),
    Section(
        "expert_indicative_tokens",
        "MoA: tokens telling of an expert",
        "Tokens with the highest pointwise mutual information with each expert, in nats (Zhang et al. "
        "2022, section 6).",
        shorten=partial(joined, by=["part", "layer", "expert"], value="pmi"),
    ),
    Section(
        "expert_kind_preferences",
        "Which experts kinds of tokens prefer",
        "Of the tokens of each kind, the share of their assignments that each expert gets.",
        partial(plot_preferences, rows="kind"),
    ),
    Section(
        "expert_token_preferences",
        "Which experts frequent tokens prefer",
        "The same for the most frequent tokens.",
        partial(plot_preferences, rows="token"),
    ),
)
