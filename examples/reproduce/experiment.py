"""The command line of an experiment: its runs, in phases, and its report."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runs import Results, Settings, carry_out

HERE = Path(__file__).resolve().parent

# options of several experiments
DATA_DIR = {"data_dir": ("folder of the corpora (see corpora.py); without it, the Hub's", None)}
GLUE_DIR = {"data_dir": ("folder of GLUE's published TSV files; without it, the Hub's", None)}
TATOEBA_DIR = {"data_dir": "folder of the corpora (see corpora.py); Tatoeba's is not on the Hub"}
WORK_DIR = {"work_dir": ("for texts of the Hub", "runs")}
PRECISION = {"precision": ("of training: bf16 or float32", "bf16")}


@dataclass(frozen=True)
class Phase:
    """Runs that may depend on what earlier phases found.

    Attributes:
        name: for the progress bar and `--phases`.
        runs: what is in the results -> the settings of this phase's runs.
        measure: the settings of a run, the command line's options -> what was measured.
        independent: its runs need nothing of earlier phases, and do not wait for them.
    """

    name: str
    runs: Callable[[Results], list[Settings]]
    measure: Callable[[Settings, argparse.Namespace], dict]
    independent: bool = False


@dataclass(frozen=True)
class Experiment:
    """A claim to test.

    Attributes:
        name: of the file of results.
        description: what `--help` says.
        phases: in their order.
        report: results, folder for figures -> Markdown.
        needed: name of an option without which no run can be made -> its help.
        optional: name of an option -> its help and its default.
        plan: what the runs have in common (sizes, flags), as plain data. Results keep a hash of it, and
            runs of another plan are not taken for these.
    """

    name: str
    description: str
    phases: Sequence[Phase]
    report: Callable[[Results, Path], str]
    needed: dict[str, str]
    optional: dict[str, tuple[str, str | None]] = field(default_factory=dict)
    plan: Callable[[], Any] = dict

    def main(self, arguments: list[str] | None = None) -> None:
        options = self._parse(arguments)
        results = Results(options.results, plan=hash_of(self.plan()))
        if options.report is not None:
            options.report.mkdir(parents=True, exist_ok=True)
            print(self.report(results, options.report))
            return
        sys.path.insert(0, str(HERE.parent))
        index, count = options.shard
        left = set(options.phases)
        missing: dict[str, int] = {}  # phase -> runs that other shards or later calls have to make
        for phase in self.phases:
            if missing and not phase.independent:
                continue
            runs = phase.runs(results)
            if phase.name in left:
                carry_out(
                    runs[index::count],
                    results,
                    lambda settings, measure=phase.measure: measure(settings, options),
                    phase.name,
                )
                results.read()  # what other shards have added
                left.remove(phase.name)
            if number := sum(not results.has(settings) for settings in runs):
                missing[phase.name] = number
        if left:
            lacking = ", ".join(
                f"{number} runs of the phase {name!r}" for name, number in missing.items()
            )
            print(
                f"{lacking} are missing, on which {', '.join(sorted(left))} may depend. Make them "
                "first, or leave them to the other shards."
            )

    def _parse(self, arguments: list[str] | None) -> argparse.Namespace:
        parser = argparse.ArgumentParser(
            description=self.description, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        names = [phase.name for phase in self.phases]
        for name, text in self.needed.items():
            parser.add_argument(f"--{name}", help=text)
        for name, (text, default) in self.optional.items():
            parser.add_argument(f"--{name}", default=default, help=text)
        parser.add_argument(
            "--results",
            type=Path,
            default=HERE / "results" / f"{self.name}.jsonl",
            help="default: %(default)s",
        )
        parser.add_argument("--phases", nargs="+", choices=names, default=names, help="default: all")
        parser.add_argument(
            "--shard",
            type=_shard,
            default=(0, 1),
            metavar="I/N",
            help="make only every N-th run, from the I-th on (0 is the first): for N processes at once",
        )
        parser.add_argument("--report", type=Path, metavar="FOLDER", help="print tables, write figures")
        options = parser.parse_args(arguments)
        lacking = [f"--{name}" for name in self.needed if getattr(options, name) is None]
        if options.report is None and lacking:
            parser.error(f"{', '.join(lacking)} needed to make runs; or give --report")
        return options


def hash_of(plan: Any) -> str:
    return hashlib.sha256(json.dumps(plan, sort_keys=True, default=str).encode()).hexdigest()[:12]


def _shard(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    if not (index.isdigit() and count.isdigit() and int(index) < int(count)):
        raise argparse.ArgumentTypeError(f"must be I/N with I < N, such as 0/2 (got {text!r})")
    return int(index), int(count)
