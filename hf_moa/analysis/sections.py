"""What a report says of a table: title, explanation, figure, and what it prints of the numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pandas as pd

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


def whole(table: pd.DataFrame) -> pd.DataFrame:
    """All of a short table, beside its figure."""
    return table


def with_mean(table: pd.DataFrame) -> pd.DataFrame:
    """With a mean over all layers."""
    mean = {"part": "all", "layer": "mean"}
    mean |= {name: table[name].mean() for name in ("entropy", "uniform")}
    rows = [*table.to_dict(orient="records"), mean]
    return pd.DataFrame(rows, columns=table.columns, dtype=object).fillna("")


def joined(table: pd.DataFrame, by: list[str], value: str) -> pd.DataFrame:
    """One row for each group: its tokens, each with a number behind it."""
    text = table["token"].map(f"{CODE}{{}}{CODE}".format) + table[value].map(" {:.2f}".format)
    named = table.assign(tokens=text)
    return named.groupby(by, sort=False)["tokens"].agg(", ".join).reset_index()
