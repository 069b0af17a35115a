"""Experiments of many runs, which can be stopped at any time and go on where they were.

A finished run is a line of a JSON file: its settings, what was measured, and where. A run whose settings
stand in the file already is skipped.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from hf_moa.environment import environment

Settings = dict[str, Any]


class Results:
    """The finished runs of an experiment, in a file of JSON lines.

    Args:
        path: the file; it need not exist yet.
        plan: names what all its runs have in common; None for whatever it is.

    Raises:
        ValueError: the file holds runs of another plan.
    """

    def __init__(self, path: str | Path, *, plan: str | None = None):
        self.path, self.plan = Path(path), plan
        self.rows: list[dict] = []
        self.read()

    def read(self) -> None:
        """Read the file again: other processes may have added to it."""
        self.rows = read_json_lines(self.path) if self.path.is_file() else []
        others = [row for row in self.rows if row.get("plan", self.plan) != self.plan]
        if self.plan is not None and others:
            raise ValueError(
                f"{self.path} holds {len(others)} runs of other sizes or flags than the script has now: "
                "give another file with --results, or go back to that script."
            )

    def find(self, **settings: Any) -> list[dict]:
        """The runs that have these settings, whatever their others are; None for those without one."""
        return [
            row for row in self.rows if all(row["settings"].get(k) == v for k, v in settings.items())
        ]

    def has(self, settings: Settings) -> bool:
        return any(row["settings"] == settings for row in self.rows)

    def add(self, settings: Settings, measured: dict, seconds: float) -> None:
        row = {
            **({} if self.plan is None else {"plan": self.plan}),
            "settings": settings,
            "measured": measured,
            "seconds": round(seconds, 1),
            "machine": describe_machine(),
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # One write: a run that is cut off leaves no half line.
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        self.rows.append(row)


def read_json_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def carry_out(
    runs: Iterable[Settings], results: Results, measure: Callable[[Settings], dict], title: str
) -> None:
    """Make the runs that are not finished yet, with a progress bar.

    Args:
        runs: settings that JSON can hold; two runs never have the same.
        results: they are added there, each as soon as it is finished.
        measure: makes one run and returns what was measured.
        title: of the progress bar.
    """
    runs = list(runs)
    todo = [settings for settings in runs if not results.has(settings)]
    with tqdm(total=len(runs), initial=len(runs) - len(todo), desc=title, unit="run") as bar:
        for settings in todo:
            bar.set_postfix_str(" ".join(str(value) for value in settings.values()))
            start = time.perf_counter()
            results.add(settings, measure(settings), time.perf_counter() - start)
            bar.update()


def each_seed(seeds: Iterable[int], variants: Iterable[str], steps: int) -> list[Settings]:
    """The runs of some variants with some seeds, seed by seed."""
    variants = list(variants)
    return [{"variant": variant, "steps": steps, "seed": seed} for seed in seeds for variant in variants]


def run_arguments(settings: Settings, options: argparse.Namespace) -> Settings:
    """What `train_on_wikitext` and `train_translation` take from a run and from the command line."""
    return {
        "steps": settings["steps"],
        "seed": settings["seed"],
        "data_dir": options.data_dir,
        "work_dir": options.work_dir,
    }


def describe_machine() -> str:
    facts = environment()
    processor = next(iter(facts["cuda"]), facts["processor"])
    return (
        f"{processor}, {facts['threads']} of {facts['cpus']} threads, torch {facts['torch']}, "
        f"transformers {facts['transformers']}"
    )
