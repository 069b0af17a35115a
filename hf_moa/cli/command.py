"""What the commands share."""

import argparse
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def add_command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], summary: str, example: str
) -> argparse.ArgumentParser:
    """A command's parser, whose help ends with an example.

    Args:
        commands: what `add_subparsers` returned.
        run: carries the command out and returns the exit code.
    """
    parser = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=f"example: {example}",
    )
    parser.set_defaults(run=run)
    return parser


def given(args: argparse.Namespace, kind: type) -> dict[str, Any]:
    """Those arguments that were given and are fields of the dataclass `kind`."""
    names = {field.name for field in dataclasses.fields(kind)}
    return {name: value for name, value in vars(args).items() if name in names}


@contextmanager
def without_bars() -> Iterator[None]:
    """Loading and saving take seconds, and an error is to be the only line."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def tokenizer_of(source: str) -> Any:
    """The tokenizer beside a checkpoint; None where there is none."""
    from transformers import AutoTokenizer
    from transformers.utils import cached_file

    # AutoTokenizer makes an empty tokenizer of a folder without files for one.
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        if Path(source).is_dir():
            found = (Path(source) / name).is_file()
        else:
            found = cached_file(source, name, _raise_exceptions_for_missing_entries=False)
        if found:
            return AutoTokenizer.from_pretrained(source)
    return None
