"""Budgets against models of fewer layers: quality by measured time, in tables and figures."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from figures import draw_line, panels, save
from runs import Results, Settings
from students import CCT, ITSELF, LAYERS, NESTED, PLAIN, Budgets, columns
from summaries import (
    Point,
    above_line,
    at_budget,
    by_seed,
    latest,
    time_and_machine,
    with_deviation,
)

from hf_moa.markdown import table


@dataclass(frozen=True)
class AgainstCut:
    """The runs of one task: a plain model, and its students (see `students.py`).

    Attributes:
        results: all of them.
        settings: that the runs of this task have.
        measure: of quality, as runs call it; budgets have one each. It is multiplied by `scale`.
        name: of quality, in tables.
        points: of quality, what differences are in.
        full: the layers of the plain model.
        cut: the models of fewer layers.
        budgets: of each model that has some.
        batch_sizes: of the times, each measured by one run, with the setting `latency_of_batch`.
        unit: of the times.
    """

    results: Results
    settings: Settings
    measure: str
    name: str
    full: str
    cut: tuple[str, ...]
    budgets: Budgets
    batch_sizes: tuple[int, ...]
    unit: str
    scale: float = 1.0
    points: str = "points"

    @property
    def models(self) -> tuple[str, ...]:
        return PLAIN, ITSELF, *self.cut, *self.budgets

    def times(self, size: int) -> dict[str, float]:
        """Column -> time in batches of a size; empty where they were not measured."""
        return latest(self.results, **self.settings, latency_of_batch=size)

    def qualities(self, model: str, budget: float | None) -> dict[int, float]:
        """By seed."""
        measure = at_budget(self.measure, budget)
        found = by_seed(self.results, measure, **self.settings, model=model)
        return {seed: self.scale * value for seed, value in found.items()}

    def computes(self, model: str, budget: float | None) -> list[float]:
        """The share of the budgeted matrices that was used, of each seed."""
        if budget is None:
            return []
        measure = at_budget("compute", budget)
        return list(by_seed(self.results, measure, **self.settings, model=model).values())

    def table(self) -> str:
        """Quality, compute fraction, and time, of each model and budget."""
        rows = []
        for model in self.models:
            for column, budget in columns(model, self.budgets).items():
                quality = self.qualities(model, budget)
                if not quality:
                    continue
                times = [self._time(column, model, size) for size in self.batch_sizes]
                compute = with_deviation(self.computes(model, budget), "{:.2f}")
                values = with_deviation(quality.values())
                rows.append([column, str(len(quality)), values, compute, *times])
        heads = [f"{self.unit}, batch {size} (speed-up)" for size in self.batch_sizes]
        return table(["model", "seeds", self.name, "compute fraction", *heads], rows)

    def _time(self, column: str, model: str, size: int) -> str:
        found = self.times(size)
        if not found:
            return "-"
        time = found[timed_as(column, model)]
        return f"{time:.2f} ({found[PLAIN] / time:.2f}x)"

    def table_against_cut(self) -> str:
        """How far each budget is above what models of fewer layers give in the same time."""
        rows = []
        for model in self.budgets:
            for column, budget in columns(model, self.budgets).items():
                if self.qualities(model, budget):
                    apart = (self.above_cut(model, budget, size) for size in self.batch_sizes)
                    rows.append([column, *(with_deviation(values, sign=True) for values in apart)])
        heads = [f"{self.points} above the cut models' line, batch {n}" for n in self.batch_sizes]
        return table(["model", *heads], rows)

    def above_cut(self, model: str, budget: float | None, size: int) -> list[float]:
        """Points of quality, of each seed that has the whole line."""
        times = self.times(size)
        if not times:
            return []

        def point(model: str, budget: float | None) -> Point:
            time = times[timed_as(at_budget(model, budget), model)]
            quality = self.qualities(model, budget)
            return dict.fromkeys(quality, time), quality

        line = [point(each, None) for each in (ITSELF, *self.cut)]
        cost, quality = point(model, budget)
        of_line = set.intersection(*(set(values) for _, values in line))
        return above_line((cost, {seed: y for seed, y in quality.items() if seed in of_line}), line)

    def report(self, path: Path) -> str:
        """Tables in Markdown; the figure is written to the path."""
        if timed := [size for size in self.batch_sizes if self.times(size)]:
            figure, axes = panels(len(timed))
            for axis, size in zip(axes, timed, strict=True):
                self.draw(axis, size)
                axis.set_ylabel(self.name)
            save(figure, axes, path)
        time = time_and_machine(self.results, **self.settings)
        return "\n\n".join([self.table(), self.table_against_cut(), time])

    def draw(self, axis: Any, size: int) -> None:
        """Quality against time in batches of a size: the cut models, and each checkpoint."""
        *others, last = (name.removesuffix(" layers") for name in (self.full, *self.cut))
        lines: dict[str, Iterable[str]] = {
            f"{', '.join(others)} and {last} layers, each distilled by itself": (ITSELF, *self.cut),
            "one checkpoint, nested budgets": (NESTED,),
            "one checkpoint, CCT": (CCT,),
            "one checkpoint, nested budgets of fewer layers": (LAYERS,),
        }
        found = self.times(size)
        for style, (name, models) in enumerate(lines.items(), 1):
            points = [
                (found[timed_as(column, model)], list(values.values()))
                for model in models
                if model in self.models
                for column, budget in columns(model, self.budgets).items()
                if (values := self.qualities(model, budget))
            ]
            if points:
                draw_line(axis, points, style, label=name)
        axis.set_xlabel(f"{self.unit}, batches of {size}")


def timed_as(column: str, model: str) -> str:
    """The column whose time a model has: distilled or not, the plain one is as fast."""
    return PLAIN if model == ITSELF else column
