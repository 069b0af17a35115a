"""Text that a command runs a model on."""

import argparse
from typing import Any

from hf_moa.extras import from_extra

from .command import tokenizer_of

_ROLES = ("text", "pair", "label", "target")


def add_data_arguments(parser: Any, *, required: bool = False, use: str = "") -> None:
    """`--data` and what says which of it to read.

    Args:
        parser: or a group of one.
        use: what the command does with it, where its help does not say.
    """
    kinds = "text: .tsv, .csv, .json, .jsonl, .parquet, else one a line; or a dataset of the Hub"
    parser.add_argument(
        "--data",
        required=required,
        metavar="FILE",
        help=f"{kinds}; {use}" if use else kinds,
    )
    parser.add_argument("--text-column", metavar="NAME", help="default: text")
    parser.add_argument(
        "--pair-column", metavar="NAME", help="the second text of a pair (default: pair)"
    )
    parser.add_argument("--target-column", metavar="NAME", help="the decoder's side (default: target)")
    parser.add_argument("--target-data", metavar="FILE", help="the decoder's side, line by line")
    parser.add_argument("--subset", metavar="NAME", help="of a dataset of the Hub")
    parser.add_argument("--split", default="test", help="of a dataset of the Hub (default: %(default)s)")


def add_size_arguments(parser: Any) -> None:
    """How much of the data, and in what batches."""
    parser.add_argument("--limit", type=int, metavar="N", help="the first N texts (default: all)")
    parser.add_argument("--batch-size", type=int, default=16, help="default: %(default)s")
    parser.add_argument(
        "--max-length", type=int, metavar="TOKENS", help="default: the model's, at most 512"
    )


def check_at_least_1(args: argparse.Namespace, *names: str) -> None:
    """What can be refused before anything is loaded.

    Raises:
        ValueError: one of these arguments is given and below 1.
    """
    for name in names:
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1 (got {value})")


def read_data(args: argparse.Namespace, *, limit: int | None) -> Any:
    """The texts that the arguments name, as `read_text` returns them."""
    with from_extra("analysis"):
        import datasets
    from hf_moa.text_batches import read_text

    columns = {role: getattr(args, f"{role}_column", None) for role in _ROLES}
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        return read_text(
            args.data,
            columns={role: name for role, name in columns.items() if name is not None},
            target_file=args.target_data,
            subset=args.subset,
            split=args.split,
            limit=limit,
        )
    finally:
        if shown:
            datasets.enable_progress_bars()


def tokenizer_for(model: Any, source: str) -> Any:
    """The tokenizer of a loaded checkpoint; of an adapter without one, its base's.

    Raises:
        ValueError: there is none.
    """
    from hf_moa.gated_models import gated_model_of

    tokenizer = tokenizer_of(source)
    if not tokenizer and (base := gated_model_of(model).name_or_path) is not None:
        tokenizer = tokenizer_of(base)
    if tokenizer is None:
        raise ValueError(f"{source} must have its tokenizer beside it to read text (got none)")
    return tokenizer
