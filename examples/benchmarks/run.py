"""Measures the gated layers against transformers' own, in one process, in turns.

    python examples/benchmarks/run.py   # all: more than an hour on one thread
    python examples/benchmarks/run.py moa --threads 2 --turns 7 --output_dir out
    GLIBC_TUNABLES=glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=4294967296 \
        python examples/benchmarks/run.py moa                 # with a malloc that keeps its memory

Prints tables in Markdown: median time, half the distance between the quartiles in per cent of it, and
the median of the ratios to the first candidate, turn by turn; of memory, its size and ratio.
`--output_dir` gets them as results.json, in short as results.md, and a picture of the ratios.
"""

import argparse
import json
from pathlib import Path

import cct
import decoding
import mae
import memory
import moa
import torch
import transformers
from tables import Table, conditions, summary

BENCHMARKS = {
    "mae": mae.measure,
    "moa": moa.measure,
    "cct": cct.measure,
    "decoding": decoding.measure,
    "memory": memory.measure,
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("benchmark", nargs="*", help=f"of {', '.join(BENCHMARKS)}; default: all")
    parser.add_argument("--threads", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--turns", type=int, default=15, help="default: %(default)s")
    parser.add_argument("--output_dir", type=Path)
    options = parser.parse_args(arguments)
    unknown = set(options.benchmark) - set(BENCHMARKS)
    if unknown:
        parser.error(f"{', '.join(unknown)}: must be of {', '.join(BENCHMARKS)}")

    torch.set_num_threads(options.threads)
    transformers.utils.logging.set_verbosity_error()
    dtype = getattr(torch, options.dtype)
    where = conditions(dtype)
    heading = ", ".join(f"{name} {value}" for name, value in where.items())
    print(f"{heading}\n")
    tables = []
    for name in options.benchmark or BENCHMARKS:
        torch.manual_seed(0)
        for table in BENCHMARKS[name](turns=options.turns, dtype=dtype):
            print(f"{table.markdown()}\n", flush=True)
            tables.append(table)
    if options.output_dir is not None:
        write(options.output_dir, heading, where, tables)


def write(folder: Path, heading: str, where: dict, tables: list[Table]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.md").write_text(f"{heading}\n\n{summary(tables)}\n", encoding="utf-8")
    data = {"environment": where, "tables": [table.data() for table in tables]}
    (folder / "results.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    draw(folder / "ratios.svg", tables)


def draw(path: Path, tables: list[Table]) -> None:
    """The ratios of all tables; 1 is the first candidate of each."""
    try:
        import matplotlib
    except ImportError:
        print('The picture needs matplotlib: pip install "hf-moa[plots]"')
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [(table, result) for table in tables for result in table.results[1:]]
    figure, axis = pyplot.subplots(figsize=(9, 0.19 * len(rows) + 1), layout="constrained")
    colours = dict(zip(BENCHMARKS, ("#0072B2", "#009E73", "#D55E00", "#E69F00", "#666666"), strict=True))
    axis.barh(
        range(len(rows)),
        [result.ratio for _, result in rows],
        color=[colours[table.group] for table, _ in rows],
    )
    axis.set_yticks(range(len(rows)), [f"{b.title}: {t.name}" for b, t in rows], fontsize=6)
    axis.invert_yaxis()
    axis.axvline(1, color="black", linewidth=0.8)
    axis.set_xlabel("time or memory / that of the plain layer or model")
    figure.savefig(path)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
