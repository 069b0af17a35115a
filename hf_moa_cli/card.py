"""`hf-moa card`: the model card of a checkpoint or an adapter."""

import argparse
import json
from pathlib import Path
from typing import Any

from .command import add_command

# What the metadata ought to say -> the option that says it.
_OPTIONS = {
    "license": "--license",
    "base_model": "--base-model",
    "datasets": "--dataset",
    "metrics": "--metrics",
}


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "card",
        run,
        "write the model card of a gated checkpoint or adapter, from what lies in its folder",
        "hf-moa card ./mae-bert --license apache-2.0 --base-model google-bert/bert-base-uncased "
        "--dataset nyu-mll/glue",
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="folder of a model or a PEFT adapter")
    parser.add_argument("--name", metavar="ID", help="the model's id on the Hub (default: the folder)")
    parser.add_argument(
        "--license", metavar="ID", help="the Hub's identifier of the license, such as apache-2.0"
    )
    parser.add_argument("--base-model", metavar="ID", help="id on the Hub of the model it started from")
    parser.add_argument(
        "--dataset",
        nargs="+",
        default=[],
        metavar="NAME",
        help="ids on the Hub of the data sets that it was trained on",
    )
    parser.add_argument(
        "--metrics",
        metavar="FILE.json",
        help="metrics by name (default: CHECKPOINT/all_results.json, eval_results.json or the log)",
    )
    parser.add_argument(
        "--budgets",
        metavar="FILE.json",
        help="rows of evaluate_budgets (default: CHECKPOINT/budget_results*.json, if there is one)",
    )
    parser.add_argument("--output", metavar="FILE", help="file to write (default: CHECKPOINT/README.md)")
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace a card; sections of your own and metadata that is not known anew stay",
    )
    parser.add_argument("--json", action="store_true", help="print what the card says as JSON")


def run(args: argparse.Namespace) -> int:
    beside = Path(args.checkpoint) / "README.md"
    output = Path(args.output) if args.output is not None else beside
    if output.is_dir():
        raise ValueError(f"--output must be a file (got {output}, a folder)")
    from hf_moa.model_card import checkpoint_card, is_unfinished, read_card, write_card

    old = read_card(output)
    if old is not None and not is_unfinished(old) and not args.overwrite:
        raise ValueError(
            f"{output} is there already; give --overwrite to replace it (your own sections stay), or "
            "another file with --output"
        )
    card = checkpoint_card(
        args.checkpoint,
        name=args.name,
        license=args.license,
        base_model=args.base_model,
        datasets=args.dataset,
        metrics=args.metrics,
        budgets=args.budgets,
        old=old,
    )
    write_card(card, output)
    unsaid = [option for name, option in _OPTIONS.items() if not card.data.get(name)]
    if args.json:
        facts = {"card": str(output), "metadata": card.data.to_dict(), "unsaid": unsaid}
        print(json.dumps(facts, indent=1, default=str))  # YAML has dates
        return 0
    print(f"{output}: tags {', '.join(card.data.tags)}")
    if unsaid:
        print(f"It does not say, and these options would: {', '.join(unsaid)}")
    return 0
