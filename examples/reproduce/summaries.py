"""Runs of several seeds in a few numbers."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from runs import Results

from hf_moa.markdown import table

Point = tuple[dict[int, float], dict[int, float]]  # x and y, by seed


@dataclass(frozen=True)
class Column:
    """One measure in a table of variants.

    Attributes:
        name: of the column.
        measure: of the runs.
        form: of a number.
        scale: it is multiplied by this.
        paired: add the difference to the first variant, seed by seed.
    """

    name: str
    measure: str
    form: str = "{:.1f}"
    scale: float = 1.0
    paired: bool = False


def variant_table(
    results: Results, variants: Iterable[str], columns: Sequence[Column], **settings: Any
) -> str:
    """A row for each variant: mean ± standard deviation over the seeds, and differences seed by seed.

    Args:
        variants: values of the setting `variant`; the first is the base of the differences.
        settings: that all runs of the table have.
    """
    variants = list(variants)
    heads = ["variant", "seeds"]
    for column in columns:
        heads += [column.name, f"{column.name}, paired difference"][: 1 + column.paired]
    rows = []
    for variant in variants:
        cells = [str(len(results.find(variant=variant, **settings)))]
        for column in columns:
            found, base = (
                scaled_by_seed(results, column, variant=each, **settings)
                for each in (variant, variants[0])
            )
            cells.append(with_deviation(found.values(), column.form))
            if column.paired:
                apart = [] if variant == variants[0] else differences(found, base)
                cells.append(with_deviation(apart, column.form, sign=True))
        rows.append([variant, *cells])
    return table(heads, rows)


def scaled_by_seed(results: Results, column: Column, **settings: Any) -> dict[int, float]:
    found = by_seed(results, column.measure, **settings)
    return {seed: column.scale * value for seed, value in found.items()}


def by_seed(results: Results, measure: str, **settings: Any) -> dict[int, float]:
    """Seed -> what was measured in the run that has these settings; of runs that measured it."""
    return {
        row["settings"]["seed"]: row["measured"][measure]
        for row in results.find(**settings)
        if row["measured"].get(measure) is not None
    }


def differences(values: dict[int, float], base: dict[int, float]) -> list[float]:
    """Of each seed that both have."""
    return [values[seed] - base[seed] for seed in sorted(values.keys() & base.keys())]


def above_line(point: Point, line: Iterable[Point]) -> list[float]:
    """How far a model is above others of the same cost, seed by seed.

    Args:
        point: its cost and its quality.
        line: those of others, of at least two costs. It goes straight from one to the next, and on past
            the last.
    """
    line, (x, y) = list(line), point
    found = []
    for seed in sorted(x.keys() & y.keys()):
        others = sorted({xs[seed]: ys[seed] for xs, ys in line if seed in xs and seed in ys}.items())
        if len(others) > 1:
            right = next((i for i, (at, _) in enumerate(others) if i and at >= x[seed]), len(others) - 1)
            (x0, y0), (x1, y1) = others[right - 1 : right + 1]
            found.append(y[seed] - (y0 + (x[seed] - x0) / (x1 - x0) * (y1 - y0)))
    return found


def best_rate(results: Results, measure: str, *, smallest: bool = False, **settings: Any) -> float:
    """The learning rate of the run with the largest (or smallest) value among those with `settings`; NaN
    of none."""
    rows = results.find(**settings)
    choose = min if smallest else max
    row = choose(rows, key=lambda row: row["measured"][measure], default=None)
    return float("nan") if row is None else row["settings"]["learning_rate"]


def latest(results: Results, **settings: Any) -> dict[str, float]:
    """What the last run that has these settings measured; empty of none."""
    rows = results.find(**settings)
    return rows[-1]["measured"] if rows else {}


def at_budget(name: str, budget: float | None) -> str:
    """What a measure or a model is called at a budget of CCT; without one, as it is."""
    return name if budget is None else f"{name} at {budget:g}"


def mean_and_deviation(values: Iterable[float]) -> tuple[float, float]:
    """Mean and sample standard deviation, 0 for a single value."""
    values = list(values)
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def with_deviation(values: Iterable[float], form: str = "{:.1f}", *, sign: bool = False) -> str:
    """`12.3 ± 0.4`, or `-` of no values."""
    values = list(values)
    if not values:
        return "-"
    mean, deviation = mean_and_deviation(values)
    signed = ("+" if sign and mean > 0 else "") + form.format(mean)
    return f"{signed} ± {form.format(deviation)}" if len(values) > 1 else signed


def time_and_machine(results: Results, **settings: Any) -> str:
    """How long the runs took, and where."""
    rows = results.find(**settings)
    if not rows:
        return "No runs yet."
    hours = sum(row["seconds"] for row in rows) / 3600
    machines = " and ".join(dict.fromkeys(row["machine"] for row in rows))
    median = statistics.median(row["seconds"] for row in rows) / 60
    return f"{len(rows)} runs, {hours:.1f} hours, {median:.1f} minutes each (median); {machines}."
