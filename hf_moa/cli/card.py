"""`hf-moa card`: the model card of a checkpoint or an adapter."""

import argparse
import json
from pathlib import Path
from typing import Any

from .command import add_command, load_checkpoint, without_bars
from .data import add_data_arguments, add_size_arguments, check_at_least_1, read_data, tokenizer_for

# What the metadata ought to say -> the option that says it.
_OPTIONS = {
    "license": "--license",
    "base_model": "--base-model",
    "datasets": "--dataset",
    "language": "--language",
    "metrics": "--metrics",
}


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "card",
        run,
        "write the model card of a gated checkpoint or adapter, from what lies in its folder",
        "hf-moa card ./bert-mae --license apache-2.0 --base-model google-bert/bert-base-uncased "
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
    parser.add_argument("--language", nargs="+", metavar="CODE", help="of its text, such as en")
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
        help="replace a card; sections of your own and metadata that is not found again stay",
    )
    parser.add_argument("--json", action="store_true", help="print what the card says as JSON")
    load = parser.add_argument_group(
        "expert load", "Measured on text, for which the weights are loaded; without, they are not."
    )
    add_data_arguments(load)
    add_size_arguments(load)


def run(args: argparse.Namespace) -> int:
    beside = Path(args.checkpoint) / "README.md"
    output = Path(args.output) if args.output is not None else beside
    if output.is_dir():
        raise ValueError(f"--output must be a file (got {output}, a folder)")
    check_at_least_1(args, "limit", "batch_size", "max_length")
    import hf_moa.registration  # noqa: F401 - the card is written from what AutoConfig reads
    from hf_moa.model_card import checkpoint_card, is_unfinished, read_card, write_card
    from hf_moa.model_card.existing import metadata_of

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
        language=args.language,
        metrics=args.metrics,
        budgets=args.budgets,
        old=old,
        **({} if args.data is None else _expert_load(args)),
    )
    write_card(card, output)
    unsaid = [option for name, option in _OPTIONS.items() if not card.data.get(name)]
    if args.json:
        facts = {"card": str(output), "metadata": card.data.to_dict(), "unsaid": unsaid}
        print(json.dumps(facts, indent=1, default=str))  # YAML has dates
        return 0
    print(f"{output}: tags {', '.join(metadata_of(card).tags or [])}")
    if unsaid:
        print(f"It does not say, and these options would: {', '.join(unsaid)}")
    return 0


def _expert_load(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of `checkpoint_card`: the load on the given text, and what text that is.

    Raises:
        ValueError: the model has no experts; the text cannot be read.
    """
    from hf_moa.analysis import analyze
    from hf_moa.expert_load import expert_load_in
    from hf_moa.gated_models import gated_model_of
    from hf_moa.text_batches import TextBatches

    with without_bars():
        model = load_checkpoint(args.checkpoint)
        gated = gated_model_of(model)
        config = gated.config
        if config.attention_type == "mha" and config.ffn_type == "dense":
            raise ValueError(
                "--data measures the load of experts, and the model must have some (got attention_type "
                "'mha' and ffn_type 'dense'); leave it out"
            )
        data = read_data(args, limit=args.limit)
        sizes = {"batch_size": args.batch_size, "max_length": args.max_length}
        tokenizer = tokenizer_for(model, args.checkpoint)
    batches = TextBatches(data, tokenizer, gated, with_labels=False, **sizes)
    # only at the largest budget: the others are not asked for
    tables = analyze(model, batches, budgets=config.listed_budgets[:1] or None).tables
    load = expert_load_in(tables, is_encoder_decoder=config.is_encoder_decoder)
    return {"expert_load": load, "expert_load_of": f"{len(data):,} texts of {Path(args.data).name}"}
