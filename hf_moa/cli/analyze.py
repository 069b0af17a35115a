"""`hf-moa analyze`: a report of what a checkpoint's gates learned."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from hf_moa.extras import from_extra
from hf_moa.output_folder import check_writable

from .command import add_command, budget, load_checkpoint, move, without_bars
from .data import add_data_arguments, add_size_arguments, check_at_least_1, read_data, tokenizer_for

_FORMATS = (".html", ".md")


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "analyze",
        run,
        "measure what a checkpoint's gates do on some text, and write a report with tables and figures",
        "hf-moa analyze ./bert-mae --data dev.tsv --text-column sentence --output report.html",
    )
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="folder or Hub id, of a model or an adapter"
    )
    data = parser.add_argument_group("data")
    add_data_arguments(data, required=True)
    data.add_argument(
        "--label-column", metavar="NAME", help="for a classifier's accuracy (default: label)"
    )
    add_size_arguments(data)
    measures = parser.add_argument_group("measures")
    measures.add_argument(
        "--budgets",
        nargs="+",
        type=budget,
        metavar="BUDGET",
        help="of CCT (default: all of the model's)",
    )
    measures.add_argument(
        "--least-count",
        type=int,
        default=10,
        help="occurrences of the tokens that tables name (default: %(default)s)",
    )
    measures.add_argument(
        "--top-tokens", type=int, default=10, help="how many they name (default: %(default)s)"
    )
    measures.add_argument(
        "--draws", type=int, default=3, help="of random MAE experts (default: %(default)s)"
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--output",
        type=Path,
        default=Path("gates.html"),
        metavar="FILE",
        help=".html, with all in it, or .md, with figures beside (default: %(default)s)",
    )
    output.add_argument("--overwrite", action="store_true", help="replace an earlier report")
    output.add_argument("--json", action="store_true", help="print all tables as JSON too")
    parser.add_argument("--device", help="such as cuda (default: where the model loads)")


def run(args: argparse.Namespace) -> int:
    _check(args)
    from hf_moa.analysis import analyze, write_report
    from hf_moa.gated_models import gated_model_of
    from hf_moa.text_batches import TextBatches

    with without_bars():
        model = load_checkpoint(args.checkpoint, budgets=args.budgets)
        tokenizer = tokenizer_for(model, args.checkpoint)
        data = read_data(args, limit=args.limit)
    move(model, args.device)
    gated = gated_model_of(model)
    sizes = {"batch_size": args.batch_size, "max_length": args.max_length}
    labelled = TextBatches(data, tokenizer, gated, with_labels=True, **sizes)
    analysis = analyze(
        model,
        TextBatches(data, tokenizer, gated, with_labels=False, **sizes),
        tokenizer=tokenizer,
        budgets=args.budgets,
        least_count=args.least_count,
        top_tokens=args.top_tokens,
    )
    analysis.facts["checkpoint"] = Path(args.checkpoint).name or args.checkpoint
    analysis.facts["data"] = Path(args.data).name
    if labelled.has_labels:
        try:
            analysis.tables.update(_metrics(args, model, labelled))
        except ValueError as error:  # the gates are measured all the same
            print(f"hf-moa analyze: no metrics: {error}", file=sys.stderr)
    if args.json:
        print(json.dumps(analysis.as_dict(), indent=1))
    write_report(analysis, args.output)
    if not args.json:
        print(f"{args.output}: {len(analysis.tables)} tables of {len(data)} texts")
    return 0


def _check(args: argparse.Namespace) -> None:
    """What can be refused before anything is loaded."""
    if args.output.suffix not in _FORMATS:
        raise ValueError(f"--output must end in {' or '.join(_FORMATS)} (got {args.output.name})")
    if args.output.exists() and not args.overwrite:
        raise ValueError(f"{args.output} is there already; give another --output, or --overwrite")
    check_writable(args.output, "--output")
    check_at_least_1(args, "limit", "batch_size", "max_length", "least_count", "top_tokens", "draws")
    with from_extra("analysis"):
        import matplotlib  # noqa: F401 - draws the report's figures, once all is measured


def _metrics(args: argparse.Namespace, model: Any, batches: Any) -> dict[str, Any]:
    """Tables of what the gates are worth."""
    from tqdm.auto import tqdm

    from hf_moa.analysis import budget_metrics, evaluate, expert_selection
    from hf_moa.gated_models import gated_model_of

    def measure(budget: Any = None) -> dict[str, float]:
        return evaluate(model, tqdm(batches, desc="evaluate"), budget=budget)

    config = gated_model_of(model).config
    tables = {}
    if config.listed_budgets:
        budgets = args.budgets or config.listed_budgets
        tables["budget_metrics"] = budget_metrics(budgets, measure)
    if config.attention_type == "mae":
        tables["expert_selection"] = expert_selection(model, measure, draws=args.draws)
    return tables
