"""Tables of a benchmark, as Markdown and JSON."""

import os
from dataclasses import asdict, dataclass

import torch

from hf_moa.environment import environment
from hf_moa.timing import Measurement


@dataclass(frozen=True)
class Table:
    """One comparison.

    Attributes:
        group: the benchmark it belongs to.
        title: what was compared.
        results: of the candidates; the first is what the others are compared with.
        unit: of their values.
    """

    group: str
    title: str
    results: list[Measurement]
    unit: str = "ms"

    def markdown(self) -> str:
        lines = [f"**{self.title}**", "", f"| | {self.unit} | ± % | ratio |", "|---|---|---|---|"]
        for result in self.results:
            spread = "" if result.spread is None else f"{result.spread:.1f}"
            lines.append(f"| {result.name} | {result.value:.2f} | {spread} | {result.ratio:.3f} |")
        return "\n".join(lines)

    def data(self) -> dict:
        return asdict(self)


def merged(tables: list[Table]) -> list[list[Table]]:
    """Those of the same benchmark, candidates and unit together."""
    found: dict[tuple, list[Table]] = {}
    for table in tables:
        names = tuple(result.name for result in table.results)
        found.setdefault((table.group, table.unit, names), []).append(table)
    return list(found.values())


def summary(tables: list[Table]) -> str:
    """Tables of the same candidates as one, a row each: the first candidate's value, and the others'
    ratios to it."""
    parts = []
    for rows in merged(tables):
        unit, names = rows[0].unit, [result.name for result in rows[0].results]
        spread = [] if rows[0].results[0].spread is None else ["± %"]
        head = ["", f"{names[0]}, {unit}", *spread, *names[1:]]
        lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
        for table in rows:
            first, *others = table.results
            cells = [table.title, f"{first.value:.2f}"]
            cells += [f"{first.spread:.1f}"] if spread else []
            cells += [f"{other.ratio:.3f}" for other in others]
            lines.append(f"| {' | '.join(cells)} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def conditions(dtype: torch.dtype, device: str, *, compiled: bool) -> dict[str, str]:
    """What the times depend on besides the code."""
    facts = environment()
    tuned = [f"{k}={v}" for k, v in os.environ.items() if k.startswith(("MALLOC_", "GLIBC_TUNABLES"))]
    return {
        "processor": facts["processor"] if device == "cpu" else facts["cuda"][0],
        "threads": f"{facts['threads']} of {facts['cpus']}",
        "dtype": str(dtype).removeprefix("torch."),
        "mode": "torch.compile" if compiled else "eager",
        **{name: facts[name] for name in ("torch", "transformers", "python")},
        "malloc": " ".join([os.environ.get("LD_PRELOAD", "the system's"), *tuned]),
    }
