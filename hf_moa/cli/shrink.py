"""`hf-moa shrink`: a finetuned checkpoint becomes one with several sizes."""

import argparse
import dataclasses
from typing import Any

from .command import add_command, budget
from .data import check_at_least_1


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "shrink",
        run,
        "make of a finetuned BERT, GPT-2 or T5 one checkpoint with several speeds: sort, distil, "
        "evaluate, time",
        "hf-moa shrink ./my-bert ./my-bert-sizes --train-file train.tsv --text-column sentence",
    )
    parser.add_argument("source", metavar="MODEL", help="folder or Hub id of a finetuned checkpoint")
    parser.add_argument("output_dir", metavar="OUT", help="folder for the new one")
    data = parser.add_argument_group("data", "Files: .tsv, .csv, .json, .jsonl, .parquet, else text.")
    data.add_argument("--train-file", required=True, metavar="FILE", help="examples to learn from")
    data.add_argument(
        "--validation-file", metavar="FILE", help="default: a tenth of the training examples"
    )
    for role, meaning in {
        "text": "default: text",
        "pair": "the second text of a pair (default: pair)",
        "label": "default: label",
        "target": "the decoder's side (default: target)",
    }.items():
        data.add_argument(f"--{role}-column", metavar="NAME", help=meaning)
    data.add_argument("--limit", type=int, metavar="N", help="the first N training examples")
    parser.add_argument(
        "--budgets", nargs="+", type=budget, metavar="BUDGET", help="default: 1 0.5 0.33"
    )
    parser.add_argument(
        "--layers", nargs="+", type=int, metavar="N", help="of each budget (default: all)"
    )
    parser.add_argument("--epochs", type=float, help="default: 2")
    parser.add_argument("--learning-rate", type=float, help="default: 1e-4")
    parser.add_argument("--batch-size", type=int, help="default: 32")
    parser.add_argument("--max-length", type=int, metavar="TOKENS", help="default: the model's")
    parser.add_argument(
        "--bf16", action="store_true", help="compute in bfloat16 (recent GPUs, CPUs with AVX-512 or AMX)"
    )
    parser.add_argument("--seed", type=int, help="default: 0")
    parser.add_argument("--overwrite", action="store_true", help="begin again in OUT")


def run(args: argparse.Namespace) -> int:
    check_at_least_1(args, "limit", "batch_size", "max_length")
    from hf_moa.extras import from_extra

    with from_extra("analysis"):
        import datasets
    from hf_moa.shrink import ShrinkSettings, shrink
    from hf_moa.text_batches import read_text

    datasets.disable_progress_bars()
    columns = {
        role: name
        for role in ("text", "pair", "label", "target")
        if (name := getattr(args, f"{role}_column")) is not None
    }
    fields = {field.name for field in dataclasses.fields(ShrinkSettings)}
    given = {name: value for name, value in vars(args).items() if name in fields and value is not None}
    given |= {name: tuple(given[name]) for name in ("budgets", "layers") if name in given}
    validation = args.validation_file
    shrink(
        args.source,
        args.output_dir,
        train=read_text(args.train_file, columns=columns, limit=args.limit),
        validation=None if validation is None else read_text(validation, columns=columns),
        settings=ShrinkSettings(**given),
        overwrite=args.overwrite,
    )
    print(f"\nWritten to {args.output_dir}")
    return 0
