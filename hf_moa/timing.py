"""Comparing the times of functions in one process.

The candidates take turns, so that what disturbs the machine disturbs all alike; of each turn the ratios
to the first candidate are kept, and their median is reported.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm


@dataclass(frozen=True)
class Measurement:
    """What was measured of one candidate.

    Attributes:
        name: of the candidate.
        value: of times, the median.
        ratio: to the first candidate; of times, the median of the ratios turn by turn.
        spread: of times, half the distance between their quartiles in per cent of the median.
    """

    name: str
    value: float
    ratio: float
    spread: float | None = None


def compare(
    candidates: dict[str, Callable[[], object]],
    *,
    turns: int = 21,
    least_seconds: float = 0.02,
    title: str = "",
) -> list[Measurement]:
    """Time the candidates in turns, in milliseconds.

    Args:
        candidates: name -> what to time; the first is what the others are compared with.
        turns: how often each is timed, at least twice.
        least_seconds: a candidate is called so often in a turn that it takes at least so long.
        title: of the progress bar.

    Raises:
        ValueError: `turns` below 2, of which there is no spread.
    """
    if turns < 2:
        raise ValueError(f"turns must be at least 2 (got {turns}).")
    calls = {}
    for name, function in candidates.items():
        for _ in range(3):
            seconds = _seconds(function, 1)
        calls[name] = max(1, round(least_seconds / max(seconds, 1e-9)))
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in tqdm(range(turns), desc=title, leave=False):
        # the order is turned around each time, so that nobody always follows the same one
        names = list(candidates) if turn % 2 == 0 else list(reversed(candidates))
        for name in names:
            times[name].append(_seconds(candidates[name], calls[name]) / calls[name])
    first = times[next(iter(candidates))]
    return [
        Measurement(
            name=name,
            value=1e3 * statistics.median(values),
            spread=100 * _half_quartile_distance(values) / statistics.median(values),
            ratio=statistics.median(v / f for v, f in zip(values, first, strict=True)),
        )
        for name, values in times.items()
    ]


def compiled(module: nn.Module, **options: Any) -> Callable[..., Any]:
    """A module as torch.compile makes it, on a GPU in CUDA graphs, which take Python out of the time.

    Args:
        options: of `torch.compile`, other than its mode.
    """
    graph = torch.compile(module, mode="reduce-overhead", **options)

    def call(*args: Any, **kwargs: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()  # what the last call returned may be overwritten
        return graph(*args, **kwargs)

    return call


def _seconds(function: Callable[[], object], calls: int) -> float:
    _synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        function()
    _synchronize()
    return time.perf_counter() - start


def _synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def _half_quartile_distance(values: list[float]) -> float:
    first, _, third = statistics.quantiles(values, n=4)
    return (third - first) / 2
