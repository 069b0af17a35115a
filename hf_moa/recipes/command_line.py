"""Flags of the scripts: dataclasses, read from the command line or a JSON file."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import field
from typing import Any, cast

from transformers import HfArgumentParser
from transformers.hf_argparser import DataClassType

_SAMPLED = {f"max_{use}_samples" for use in ("train", "eval", "predict")}


def optional(help_text: str) -> Any:
    """A flag that need not be given."""
    return field(default=None, metadata={"help": help_text})


def parse_arguments(args: list[str] | None, *classes: type) -> tuple[Any, ...]:
    """The command line, or the one JSON file that it names, as instances of the dataclasses."""
    args = sys.argv[1:] if args is None else args
    parser = HfArgumentParser(cast(Iterable[DataClassType], classes))
    if len(args) == 1 and args[0].endswith(".json"):
        parsed = parser.parse_json_file(args[0])
    else:
        parsed = parser.parse_args_into_dataclasses(args)
    for each in parsed:
        check_counts(each, *vars(each).keys() & _SAMPLED)
    return parsed


def check_counts(arguments: Any, *names: str) -> None:
    """Raise a ValueError where one of these flags is given and less than 1."""
    for name in names:
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ValueError(f"`{name}` must be at least 1 (got {value}).")
