"""Lines with error bars, in one style."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from summaries import mean_and_deviation

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


def panels(count: int) -> tuple[Any, list[Any]]:
    """A figure of so many panels side by side."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    size = (4.6 * count, 3.8)
    figure, axes = pyplot.subplots(1, count, figsize=size, layout="constrained", squeeze=False)
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
