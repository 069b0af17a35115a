"""Pictures of an analysis' tables. Need matplotlib, the extra `plots`.

Every function takes one table, as `Analysis.tables` has it, and returns a `matplotlib.figure.Figure`.
All are readable in grey and by the colour-blind: one colour map, even in lightness, with numbers where
they fit; and lines that differ in dashes and marks as well as in colour.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from hf_moa.extras import from_extra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOUR_MAP = "cividis"
# Okabe and Ito's colours, with dashes and marks
_LINES = (
    {"color": "#0072B2", "linestyle": "-", "marker": "o"},
    {"color": "#D55E00", "linestyle": "--", "marker": "s"},
    {"color": "#009E73", "linestyle": "-.", "marker": "^"},
    {"color": "#CC79A7", "linestyle": ":", "marker": "D"},
    {"color": "#E69F00", "linestyle": (0, (5, 1, 1, 1, 1, 1)), "marker": "v"},
    {"color": "#56B4E9", "linestyle": (0, (1, 3)), "marker": "P"},
)
_MOST_NUMBERS = 24  # columns of a heat map whose cells still have room for a number
_LIFTS = (0.25, 0.5, 1, 2, 4)  # named on the scale of pairs, which they span


def plot_entropies(table: pd.DataFrame) -> Figure:
    """`mae_entropy` or `router_entropy`: bars by layer, and the entropy of uniform choice."""
    figure, axes = _panels(table["part"].unique(), width=3.2, height=2.6, share_y=True)
    for (part, rows), axis in zip(table.groupby("part", sort=False), axes, strict=True):
        axis.bar(rows["layer"].astype(str), rows["entropy"], color="#0072B2", width=0.7)
        axis.axhline(rows["uniform"].iloc[0], color="black", linestyle="--", linewidth=1)
        axis.annotate(
            "uniform",
            (1, rows["uniform"].iloc[0]),
            xycoords=("axes fraction", "data"),
            xytext=(-2, 2),
            textcoords="offset points",
            ha="right",
            fontsize=8,
        )
        axis.set(title=part, xlabel="layer", ylim=(0, max(1.15 * table["uniform"].max(), 0.1)))
    axes[0].set_ylabel("entropy, nats")
    return figure


def plot_shares(table: pd.DataFrame, *, column: str, experts: str = "expert") -> Figure:
    """`mae_experts` (`column="share"`) or `expert_load` (`"load"`): layers by experts."""
    parts = table["part"].unique()
    size = table[experts].nunique()
    figure, axes = _panels(
        parts,
        width=max(3.0, min(0.42 * size, 11) + 0.9),
        height=0.8 + 0.34 * (table["layer"].max() + 1),
        most_columns=max(1, int(12 // max(3.0, 0.42 * size))),
    )
    for (part, rows), axis in zip(table.groupby("part", sort=False), axes, strict=True):
        grid = rows.pivot(index="layer", columns="expert", values=column)
        names = dict(zip(rows["expert"], rows[experts].astype(str), strict=True))
        # a scale for each: of many experts each has little
        highest = rows[column].max()
        image = _heat_map(axis, grid, highest=highest, columns=[names[i] for i in grid.columns])
        axis.set(title=part, xlabel=experts, ylabel="layer")
        figure.colorbar(image, ax=axis, label=column, format=_percent())
    return figure


def plot_pairs(table: pd.DataFrame, *, most_layers: int = 6) -> Figure:
    """`experts_together`: how much more often two experts serve the same token than by chance, in at
    most `most_layers` layers of each part, spread evenly.

    Lift is a ratio to chance, so all panels have one logarithmic scale with chance in its middle. It
    ends at four times and a quarter: a pair of rare experts can have a lift of 30, and what is usual
    would look all the same beside it.
    """
    panels = _layers_of_parts(table, most_layers)
    figure, axes = _panels(panels, width=2.9, height=2.6, most_columns=_columns(panels, 3))
    from matplotlib.colors import LogNorm

    size = table["other"].max() + 1
    for (title, rows), axis in zip(panels.items(), axes, strict=True):
        lift = np.full((size, size), np.nan)
        for row in rows.itertuples():
            lift[row.expert, row.other] = lift[row.other, row.expert] = row.lift
        grid = pd.DataFrame(lift.clip(_LIFTS[0], _LIFTS[-1]))
        norm = LogNorm(_LIFTS[0], _LIFTS[-1])
        image = _heat_map(axis, grid, norm=norm, columns=grid.columns, numbers=False)
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
    figure, axes = _panels(
        panels,
        width=width,
        height=0.9 + 0.3 * max(own[rows].nunique() for own in panels.values()),
        most_columns=_columns(panels, max(1, int(13 // width))),
    )
    highest = table["share"].max()  # the same at best: a token goes to k experts
    for (title, own), axis in zip(panels.items(), axes, strict=True):
        names = own[rows].drop_duplicates()
        grid = own.pivot(index=rows, columns="expert", values="share").reindex(names)
        image = _heat_map(axis, grid, highest=highest, columns=grid.columns, numbers=size <= 12)
        axis.set(title=title, xlabel="expert")
        axis.set_xticks(_few(size), _few(size))
    figure.colorbar(image, ax=axes, label="share", format=_percent())
    return figure


def plot_budget_metrics(table: pd.DataFrame) -> Figure:
    """`budget_metrics`: each metric by budget."""
    metrics = [name for name in table.columns if name != "budget"]
    figure, axes = _panels(metrics, width=3.4, height=2.6)
    table = table[::-1]  # so that compute grows rightwards, of pairs too, which are names
    for metric, axis in zip(metrics, axes, strict=True):
        axis.plot(table["budget"], table[metric], **_LINES[0])
        axis.set(title=metric, xlabel="budget")
        axis.set_xticks(table["budget"].tolist(), table["budget"].map(_name))
        axis.ticklabel_format(axis="y", useOffset=False)
        axis.grid(alpha=0.3)
    return figure


def plot_selection(table: pd.DataFrame) -> Figure:
    """`expert_selection`: each metric with all experts and with one per layer, and the standard
    deviation over the draws of random ones."""
    metrics = [name for name in table.columns if name != "experts" and not name.endswith(" std")]
    figure, axes = _panels(metrics, width=3.4, height=1.9, share_y=True)
    for metric, axis in zip(metrics, axes, strict=True):
        # points and not bars, which would have to start at zero
        std = table[f"{metric} std"].astype(float) if f"{metric} std" in table else None
        style = {"color": _LINES[0]["color"], "fmt": "o", "capsize": 4}
        axis.errorbar(table[metric], table["experts"], xerr=std, **style)
        axis.set(title=metric)
        axis.ticklabel_format(axis="x", useOffset=False)
        axis.margins(y=0.25)
        axis.grid(alpha=0.3)
    axes[0].invert_yaxis()  # the first row on top
    return figure


def plot_distribution(table: pd.DataFrame) -> Figure:
    """`cct_distribution`: tokens by their share of the full compute (Bapna et al. 2020, fig. 9)."""
    table = table.assign(middle=(table["from"] + table["to"]) / 2)
    figure, axes = _line_panels(
        table, panels="stack", lines="budget", x="middle", y="share of tokens", label="share of tokens"
    )
    for axis in axes:
        axis.set(xlabel="share of the full compute", xlim=(0, 1))
        axis.xaxis.set_major_formatter(_percent())
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
    figure, axes = _panels(
        groups,
        width=0.5 * size + 1.2,
        height=1.7 + 0.34 * (table["layer"].max() + 1),
        most_columns=max(1, int(13 // (0.5 * size + 1.2))),
    )
    for ((stack, budget), rows), axis in zip(groups, axes, strict=True):
        columns = rows["sub-network"].drop_duplicates()
        grid = rows.pivot(index="layer", columns="sub-network", values="open")[columns]
        image = _heat_map(axis, grid, highest=1, columns=columns, rotation=55)
        axis.set(title=f"{stack}, budget {_name(budget)}", ylabel="layer")
    figure.colorbar(image, ax=axes, label="gates open", format=_percent())
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
    figure, axes = _panels(table[panels].unique(), width=4.6, height=3.0, share_y=True)
    for (panel, rows), axis in zip(table.groupby(panels, sort=False), axes, strict=True):
        for style, (name, line) in zip(_styles(), rows.groupby(lines, sort=False), strict=False):
            every = max(1, len(line) // 12)
            axis.plot(line[x], line[y], label=_name(name), markersize=4, markevery=every, **style)
        axis.set_title(f"budget {_name(panel)}" if panels == "budget" else panel)
        axis.yaxis.set_major_formatter(_percent())
        axis.grid(alpha=0.3)
    axes[0].set_ylabel(label)
    handles = axes[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside right upper", title="budget" if lines == "budget" else None)
    return figure, axes


def _panels(
    names: Sequence[Any], *, width: float, height: float, share_y: bool = False, most_columns: int = 3
) -> tuple[Figure, list[Axes]]:
    """A figure with a panel for each name, in rows."""
    # Not pyplot: no window system is asked for, and no global state is left behind.
    with from_extra("plots"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

    columns = min(len(names), most_columns)
    rows = -(-len(names) // columns)
    figure = Figure(figsize=(width * columns + 0.6, height * rows + 0.3), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False, sharey=share_y).flatten()
    for axis in axes[len(names) :]:
        axis.remove()
    return figure, list(axes[: len(names)])


def _heat_map(
    axis: Axes,
    grid: pd.DataFrame,
    *,
    columns: Sequence[Any],
    highest: float = 1.0,
    norm: Any = None,
    numbers: bool = True,
    rotation: float = 0,
) -> Any:
    """Draw `grid`, with percentages in the cells where they fit; colours from 0 to `highest`, or by
    another `norm`."""
    from matplotlib.colors import Normalize

    image = axis.imshow(
        grid.to_numpy(),
        cmap=_COLOUR_MAP,
        norm=norm or Normalize(0, max(highest, 1e-9)),
        aspect="auto",
        interpolation="nearest",
    )
    turn = {"rotation": rotation, "ha": "right", "rotation_mode": "anchor"} if rotation else {}
    crowded = len(grid.columns) > _MOST_NUMBERS
    axis.set_xticks(range(len(grid.columns)), columns, fontsize=6 if crowded else 8, **turn)
    axis.set_yticks(range(len(grid.index)), [str(name) for name in grid.index], fontsize=8)
    if numbers and not crowded:
        for row, values in enumerate(grid.to_numpy()):
            for column, value in enumerate(values):
                colour = "black" if value > 0.5 * highest else "white"
                text = f"{100 * value:.0f}"
                axis.text(column, row, text, ha="center", va="center", fontsize=7, color=colour)
    return image


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


def _name(budget: Any) -> str:
    return f"{budget:g}" if isinstance(budget, (int, float)) else str(budget)


def _styles() -> Iterator[dict[str, Any]]:
    while True:
        yield from _LINES


def _percent() -> Any:
    from matplotlib.ticker import PercentFormatter

    return PercentFormatter(xmax=1)
