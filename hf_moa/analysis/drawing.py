"""Panels and heat maps in one style. They need matplotlib, the extra `plots`.

All are readable in grey and by the colour-blind: one colour map, even in lightness, with numbers where
they fit; and lines that differ in dashes and marks as well as in colour.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hf_moa.extras import from_extra

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOUR_MAP = "cividis"
# Okabe and Ito's colours, with dashes and marks
LINES: tuple[dict[str, Any], ...] = (
    {"color": "#0072B2", "linestyle": "-", "marker": "o"},
    {"color": "#D55E00", "linestyle": "--", "marker": "s"},
    {"color": "#009E73", "linestyle": "-.", "marker": "^"},
    {"color": "#CC79A7", "linestyle": ":", "marker": "D"},
    {"color": "#E69F00", "linestyle": (0, (5, 1, 1, 1, 1, 1)), "marker": "v"},
    {"color": "#56B4E9", "linestyle": (0, (1, 3)), "marker": "P"},
)
_MOST_NUMBERS = 24  # columns of a heat map whose cells still have room for a number


def figure_of_panels(
    names: Sequence[Any], *, width: float, height: float, share_y: bool = False, most_columns: int = 3
) -> tuple[Figure, list[Axes]]:
    """A figure with a grid of panels, one for each name."""
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


def heat_map(
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
    turn: dict[str, Any] = (
        {"rotation": rotation, "ha": "right", "rotation_mode": "anchor"} if rotation else {}
    )
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


def name_of(value: Any) -> str:
    """Of a budget, or of what has a name."""
    return f"{value:g}" if isinstance(value, (int, float)) else str(value)


def percent() -> Any:
    from matplotlib.ticker import PercentFormatter

    return PercentFormatter(xmax=1)
