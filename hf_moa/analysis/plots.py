"""Pictures of tables that several mechanisms have, and of metrics. They need matplotlib.

Every function takes one table, as `Analysis.tables` has it, and returns a `matplotlib.figure.Figure`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .drawing import LINES, figure_of_panels, heat_map, name_of, percent

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


def plot_entropies(table: pd.DataFrame) -> Figure:
    """`mae_entropy` or `router_entropy`: bars by layer, and the entropy of uniform choice."""
    figure, axes = figure_of_panels(table["part"].unique(), width=3.2, height=2.6, share_y=True)
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
    figure, axes = figure_of_panels(
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
        image = heat_map(axis, grid, highest=highest, columns=[names[i] for i in grid.columns])
        axis.set(title=part, xlabel=experts, ylabel="layer")
        figure.colorbar(image, ax=axis, label=column, format=percent())
    return figure


def plot_budget_metrics(table: pd.DataFrame) -> Figure:
    """`budget_metrics`: each metric by budget."""
    metrics = [name for name in table.columns if name != "budget"]
    figure, axes = figure_of_panels(metrics, width=3.4, height=2.6)
    table = table[::-1]  # so that compute grows rightwards, of pairs too, which are names
    for metric, axis in zip(metrics, axes, strict=True):
        axis.plot(table["budget"], table[metric], **LINES[0])
        axis.set(title=metric, xlabel="budget")
        axis.set_xticks(table["budget"].tolist(), table["budget"].map(name_of))
        axis.ticklabel_format(axis="y", useOffset=False)
        axis.grid(alpha=0.3)
    return figure


def plot_selection(table: pd.DataFrame) -> Figure:
    """`expert_selection`: each metric with all experts and with one per layer, and the standard
    deviation over the draws of random ones."""
    metrics = [name for name in table.columns if name != "experts" and not name.endswith(" std")]
    figure, axes = figure_of_panels(metrics, width=3.4, height=1.9, share_y=True)
    for metric, axis in zip(metrics, axes, strict=True):
        # points and not bars, which would have to start at zero
        std = table[f"{metric} std"].astype(float) if f"{metric} std" in table else None
        style: dict[str, Any] = {"color": LINES[0]["color"], "fmt": "o", "capsize": 4}
        axis.errorbar(table[metric], table["experts"], xerr=std, **style)
        axis.set(title=metric)
        axis.ticklabel_format(axis="x", useOffset=False)
        axis.margins(y=0.25)
        axis.grid(alpha=0.3)
    axes[0].invert_yaxis()  # the first on top
    return figure
