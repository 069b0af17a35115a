"""Measures the gated layers against transformers' own, in one process, in turns.

    python examples/benchmarks/run.py   # all: more than an hour on one thread
    python examples/benchmarks/run.py moa --threads 2 --turns 7 --output_dir out
    python examples/benchmarks/run.py moa cct mae --device cuda --dtype bfloat16
    python examples/benchmarks/run.py moa mae training --device cuda --dtype bfloat16 --compile
    python examples/benchmarks/run.py cct cct_decoding moa mae training --device cuda --dtype bfloat16 \
        --compile --checks --seconds 300 --output_dir out         # checks and times, in five minutes
    GLIBC_TUNABLES=glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=4294967296 \
        python examples/benchmarks/run.py moa                 # with a malloc that keeps its memory

Prints tables in Markdown: median time, half the distance between the quartiles in per cent of it, and
the median of the ratios to the first candidate, turn by turn; of memory, its size and ratio.
`--output_dir` gets them as results.json and in short as results.md, written again with every table, and
at the end a picture of the ratios.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import cct
import classifiers
import decoding
import experts
import mae
import masked_lm
import memory
import moa
import moe
import torch
import training
import transformers
from tables import Table, conditions, merged, summary

BENCHMARKS = {
    "mae": mae.measure,
    "moa": moa.measure,
    "experts": experts.measure,
    "moe": moe.measure,
    "cct": cct.measure,
    "mae_decoding": decoding.measure_mae,
    "cct_decoding": decoding.measure_cct,
    "small_cct_decoding": decoding.measure_small_cct,
    "memory": memory.measure,
    "masked_lm": masked_lm.measure,
    "classifiers": classifiers.measure,
    "training": training.measure,
}
COMPILABLE = ("mae", "moa", "cct", "cct_decoding", "training")
# Okabe and Ito's colours, told apart in grey by their marks
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("benchmark", nargs="*", help=f"of {', '.join(BENCHMARKS)}; default: all")
    parser.add_argument("--threads", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="larger sizes on cuda")
    parser.add_argument(
        "--compile", action="store_true", help=f"by torch.compile; of {', '.join(COMPILABLE)}"
    )
    parser.add_argument("--turns", type=int, default=15, help="default: %(default)s")
    parser.add_argument("--checks", action="store_true", help="run the kernels' tests first")
    parser.add_argument(
        "--seconds", type=float, help="then no further table is begun; default: no limit"
    )
    parser.add_argument("--output_dir", type=Path)
    options = parser.parse_args(arguments)
    unknown = set(options.benchmark) - set(BENCHMARKS)
    if unknown:
        parser.error(f"{', '.join(unknown)}: must be of {', '.join(BENCHMARKS)}")
    eager = [name for name in options.benchmark or BENCHMARKS if name not in COMPILABLE]
    if options.compile and eager:
        parser.error(f"--compile goes only with {', '.join(COMPILABLE)} (got {', '.join(eager)})")
    if options.turns < 2:
        parser.error(f"--turns must be at least 2 (got {options.turns})")

    start = time.monotonic()
    checks = {"checks": check()} if options.checks else {}
    torch.set_num_threads(options.threads)
    transformers.utils.logging.set_verbosity_error()
    dtype = getattr(torch, options.dtype)
    where = conditions(dtype, options.device, compiled=options.compile) | checks
    heading = ", ".join(f"{name} {value}" for name, value in where.items())
    print(f"{heading}\n")
    tables: list[Table] = []
    for table in measured(options, dtype):
        print(f"{table.markdown()}\n", flush=True)
        tables.append(table)
        if options.output_dir is not None:
            write(options.output_dir, heading, where, tables)
        if options.seconds is not None and time.monotonic() - start > options.seconds:
            print(f"Stopped after {options.seconds:g} seconds, in {table.group}.")
            break
    if options.output_dir is not None:
        draw(options.output_dir / "ratios.svg", tables)


def measured(options: argparse.Namespace, dtype: torch.dtype) -> Iterator[Table]:
    extra = {"compiled": True} if options.compile else {}
    for name in options.benchmark or BENCHMARKS:
        torch.manual_seed(0)
        with torch.device(options.device):
            yield from BENCHMARKS[name](turns=options.turns, dtype=dtype, **extra)


def check() -> str:
    """What pytest says at the end of the kernels' tests on a GPU."""
    root = Path(__file__).resolve().parents[2]
    kernels = sorted(map(str, (root / "tests" / "modeling").glob("test_*_compiled.py")))
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--disable-warnings", *kernels]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    print(done.stdout[-4000:])
    return (done.stdout.strip() or done.stderr.strip()).splitlines()[-1].strip("= ")


def write(folder: Path, heading: str, where: dict, tables: list[Table]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.md").write_text(f"{heading}\n\n{summary(tables)}\n", encoding="utf-8")
    data = {"environment": where, "tables": [table.data() for table in tables]}
    (folder / "results.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def draw(path: Path, tables: list[Table]) -> None:
    """The ratios to the first candidate, a row for each table."""
    try:
        import matplotlib
    except ImportError:
        print('The picture needs matplotlib: pip install "hf-moa[plots]"')
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = merged(tables)
    heights = [1.0 + 0.24 * len(rows) for rows in panels]
    figure = pyplot.figure(figsize=(9, sum(heights)), layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axis, rows in zip(axes, panels, strict=True):
        names = [result.name for result in rows[0].results]
        for index, name in enumerate(names[1:]):
            ratios = [table.results[index + 1].ratio for table in rows]
            colour, mark = COLOURS[index % len(COLOURS)], MARKS[index % len(MARKS)]
            axis.plot(ratios, range(len(rows)), linestyle="", marker=mark, color=colour, label=name)
        axis.set_yticks(range(len(rows)), [table.title for table in rows], fontsize=7)
        axis.set_ylim(len(rows) - 0.5, -0.5)
        axis.axvline(1, color="black", linewidth=0.8)
        axis.grid(alpha=0.3)
        axis.set_xlabel(
            f"{'memory' if rows[0].unit == 'MB' else 'time'} / that of {names[0]}", fontsize=8
        )
        axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
