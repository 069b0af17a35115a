"""Tables of a benchmark, as Markdown and JSON."""

import os
import platform
from dataclasses import asdict, dataclass

import torch
import transformers
from timing import Timing

from hf_moa.environment import processor_name


@dataclass(frozen=True)
class Table:
    """One comparison.

    Attributes:
        group: the benchmark it belongs to.
        title: what was compared.
        timings: of the candidates; the first is what the others are compared with.
    """

    group: str
    title: str
    timings: list[Timing]

    def markdown(self) -> str:
        lines = [f"**{self.title}**", "", "| | ms | ± % | ratio |", "|---|---|---|---|"]
        for t in self.timings:
            lines.append(f"| {t.name} | {t.milliseconds:.2f} | {t.spread:.1f} | {t.ratio:.3f} |")
        return "\n".join(lines)

    def data(self) -> dict:
        return asdict(self)


def environment(dtype: torch.dtype) -> dict[str, str]:
    """What the times depend on besides the code."""
    tuned = [f"{k}={v}" for k, v in os.environ.items() if k.startswith(("MALLOC_", "GLIBC_TUNABLES"))]
    return {
        "processor": processor_name(),
        "threads": str(torch.get_num_threads()),
        "dtype": str(dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "malloc": " ".join([os.environ.get("LD_PRELOAD", "the system's"), *tuned]),
    }
