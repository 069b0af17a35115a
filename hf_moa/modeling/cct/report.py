"""What a report says and shows of where CCT spends its compute."""

from __future__ import annotations

from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING

from hf_moa.analysis.drawing import LINES, figure_of_panels, heat_map, name_of, percent
from hf_moa.analysis.sections import Section, joined

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def plot_distribution(table: pd.DataFrame) -> Figure:
    """`cct_distribution`: tokens by their share of the full compute (Bapna et al. 2020, fig. 9)."""
    table = table.assign(middle=(table["from"] + table["to"]) / 2)
    figure, axes = _line_panels(
        table, panels="stack", lines="budget", x="middle", y="share of tokens", label="share of tokens"
    )
    for axis in axes:
        axis.set(xlabel="share of the full compute", xlim=(0, 1))
        axis.xaxis.set_major_formatter(percent())
    return figure


def plot_frequency(table: pd.DataFrame) -> Figure:
    """`cct_frequency`: compute by how often a token occurs in the data (fig. 10)."""
    figure, axes = _line_panels(
        table,
        panels="stack",
        lines="budget",
        x="occurrences from",
        y="compute",
        label="mean share of the full compute",
    )
    for axis in axes:
        axis.set_xscale("log", base=2)
        axis.set(xlabel="occurrences of the token, from", ylim=(0, 1.02))
    return figure


def plot_activity(table: pd.DataFrame) -> Figure:
    """`cct_activity`: how often each sub-network of each layer is used, at each budget (fig. 11)."""
    groups = list(table.groupby(["stack", "budget"], sort=False))
    size = max(rows["sub-network"].nunique() for _, rows in groups)
    figure, axes = figure_of_panels(
        groups,
        width=0.5 * size + 1.2,
        height=1.7 + 0.34 * (table["layer"].max() + 1),
        most_columns=max(1, int(13 // (0.5 * size + 1.2))),
    )
    for ((stack, budget), rows), axis in zip(groups, axes, strict=True):
        columns = rows["sub-network"].drop_duplicates()
        grid = rows.pivot(index="layer", columns="sub-network", values="open")[columns]
        image = heat_map(axis, grid, highest=1, columns=columns, rotation=55)
        axis.set(title=f"{stack}, budget {name_of(budget)}", ylabel="layer")
    figure.colorbar(image, ax=axes, label="gates open", format=percent())
    return figure


def plot_steps(table: pd.DataFrame) -> Figure:
    """`cct_steps`: use of a decoder's sub-networks by decoding step (figs. 12 and 13)."""
    figure, axes = _line_panels(
        table, panels="budget", lines="sub-network", x="step", y="open", label="gates open"
    )
    for axis in axes:
        axis.set(xlabel="decoding step", ylim=(-0.02, 1.02))
    return figure


def _line_panels(
    table: pd.DataFrame, *, panels: str, lines: str, x: str, y: str, label: str
) -> tuple[Figure, list[Axes]]:
    """A panel for each value of a column, and in it a line for each of another; shares upwards."""
    figure, axes = figure_of_panels(table[panels].unique(), width=4.6, height=3.0, share_y=True)
    for (panel, rows), axis in zip(table.groupby(panels, sort=False), axes, strict=True):
        for style, (name, line) in zip(cycle(LINES), rows.groupby(lines, sort=False), strict=False):
            every = max(1, len(line) // 12)
            axis.plot(
                line[x],
                line[y],
                label=name_of(name),
                markersize=4,
                markevery=every,
                **style,
            )
        axis.set_title(f"budget {name_of(panel)}" if panels == "budget" else panel)
        axis.yaxis.set_major_formatter(percent())
        axis.grid(alpha=0.3)
    axes[0].set_ylabel(label)
    handles = axes[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside right upper", title="budget" if lines == "budget" else None)
    return figure, axes


SECTIONS = (
    Section(
        "cct_compute",
        "Compute at each budget",
        "The share of the skippable computation that was carried out, a mean over sequences: how well "
        "the gates keep to the budget.",
    ),
    Section(
        "cct_distribution",
        "Compute over tokens",
        "How many tokens get what share of the full compute of their layers (Bapna et al. 2020, fig. "
        "9).",
        plot_distribution,
    ),
    Section(
        "cct_frequency",
        "Compute and token frequency",
        "Mean share of compute of tokens by how often they occur in this data (fig. 10).",
        plot_frequency,
    ),
    Section(
        "cct_token_compute",
        "Tokens with the most and the least compute",
        "Mean share of the full compute, behind each token.",
        shorten=partial(joined, by=["budget", "stack", "which"], value="compute"),
    ),
    Section(
        "cct_activity",
        "Use of each sub-network",
        "Share of the tokens whose gate is open, by layer and sub-network, at each budget (fig. 11).",
        plot_activity,
    ),
    Section(
        "cct_steps",
        "Use by decoding step",
        "Share of the decoder's gates that are open at each position, over all layers (figs. 12 and "
        "13).",
        plot_steps,
    ),
)
