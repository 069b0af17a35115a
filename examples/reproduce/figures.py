"""Lines with error bars, and dots for the seeds of variants, in one style."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runs import Results
from summaries import Column, mean_and_deviation, scaled_by_seed

# Okabe and Ito's colours, and markers, for print and for the colour-blind
STYLES = (
    ("#666666", "x"),
    ("#0072B2", "o"),
    ("#009E73", "s"),
    ("#E69F00", "D"),
    ("#D55E00", "^"),
    ("#CC79A7", "v"),
    ("#56B4E9", "P"),
)


@dataclass(frozen=True)
class Panel:
    """One measure of variants.

    Attributes:
        column: what is measured, as in the table.
        title: of the panel.
        settings: that all runs of the panel have.
    """

    column: Column
    title: str = ""
    settings: dict[str, Any] = field(default_factory=dict)


def draw_variants(
    results: Results, variants: Iterable[str], measures: Sequence[Panel], path: Path
) -> None:
    """A line for each variant, the first on top; every seed is a dot, their mean a stroke."""
    variants, (colour, marker) = list(variants), STYLES[1]
    names, lines = max(map(len, variants)), len(variants)
    figure, axes = panels(len(measures), (3.2, 0.9 + 0.3 * lines), names=0.08 * names, sharey=True)
    for axis, panel in zip(axes, measures, strict=True):
        for place, variant in enumerate(variants):
            found = scaled_by_seed(results, panel.column, variant=variant, **panel.settings)
            values = list(found.values())
            axis.plot(values, [place] * len(values), marker, color=colour, markersize=5, alpha=0.6)
            if values:
                mean, _ = mean_and_deviation(values)
                axis.plot(mean, place, "|", color="black", markersize=12)
        axis.set_title(panel.title)
        axis.set_xlabel(panel.column.name)
    axes[0].set_yticks(range(len(variants)), variants)
    axes[0].set_ylim(lines - 0.5, -0.5)
    save(figure, axes, path)


def panels(
    count: int, size: tuple[float, float] = (4.6, 3.8), *, names: float = 0.0, sharey: bool = False
) -> tuple[Any, list[Any]]:
    """A figure of so many panels side by side, of this size each, and names left of them (inches)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    width, height = size
    size = (names + width * count, height)
    figure, axes = pyplot.subplots(
        1, count, figsize=size, layout="constrained", squeeze=False, sharey=sharey
    )
    return figure, list(axes[0])


def draw_line(axis: Any, points: Iterable[tuple[float, list[float]]], style: int, **kwargs: Any) -> None:
    """Means and standard deviations, from left to right.

    Args:
        points: x -> the values of the seeds; x without values is left out.
        style: which of `STYLES`.
    """
    drawn = [(x, *mean_and_deviation(values)) for x, values in points if values]
    if not drawn:
        return
    colour, marker = STYLES[style]
    x, mean, deviation = zip(*drawn, strict=True)
    looks = {"color": colour, "marker": marker, "markersize": 5, "capsize": 2, "linewidth": 1.4}
    axis.errorbar(x, mean, yerr=deviation, **{**looks, **kwargs})


def save(figure: Any, axes: list[Any], path: Path) -> None:
    """Write the figure; the same lines give the same file."""
    import matplotlib
    from matplotlib import pyplot

    for axis in axes:
        axis.grid(alpha=0.3)
    labelled = next((axis for axis in axes if axis.get_legend_handles_labels()[0]), None)
    if labelled is not None:
        handles, labels = labelled.get_legend_handles_labels()
        columns = 5 if len(axes) > 1 else 2
        figure.legend(
            handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=8
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": path.stem}):
        figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
