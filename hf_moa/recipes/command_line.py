"""Flags of the scripts: dataclasses, read from the command line or a JSON file."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import field
from pathlib import Path
from typing import Any, cast

from transformers import HfArgumentParser
from transformers.hf_argparser import DataClassType

from hf_moa.misspelt import did_you_mean

_SAMPLED = {f"max_{use}_samples" for use in ("train", "eval", "predict")}


def optional(help_text: str) -> Any:
    """A flag that need not be given."""
    return field(default=None, metadata={"help": help_text})


def parse_arguments(args: list[str] | None, *classes: type) -> tuple[Any, ...]:
    """The command line, or the one JSON file that it names, as instances of the dataclasses.

    Raises:
        ValueError: flags that there are not; none that says what to do; a number of samples below 1.
    """
    args = sys.argv[1:] if args is None else args
    parser = HfArgumentParser(cast(Iterable[DataClassType], classes))
    known = [name.removeprefix("--") for name in parser._option_string_actions]
    if len(args) == 1 and args[0].endswith(".json"):
        given = json.loads(Path(args[0]).read_text(encoding="utf-8"))
        unknown = [name for name in given if name not in known]
        parsed = [] if unknown else [*parser.parse_dict(given)]
    else:
        *parsed, rest = parser.parse_args_into_dataclasses(args, return_remaining_strings=True)
        unknown = [name.removeprefix("--") for name in rest if name.startswith("--")] or rest
    if unknown:
        named = ", ".join(f"--{name}{did_you_mean(name, known)}" for name in unknown)
        raise ValueError(f"There are no such flags: {named}.")
    for each in parsed:
        check_counts(each, *vars(each).keys() & _SAMPLED)
    _check_what_to_do({name: value for each in parsed for name, value in vars(each).items()})
    return tuple(parsed)


def _check_what_to_do(values: dict[str, Any]) -> None:
    work = [name for name in ("do_train", "do_eval", "do_predict", "eval_budgets") if name in values]
    if "do_train" in work and not any(values[name] for name in work):
        flags = ", ".join(f"--{name}" for name in work)
        raise ValueError(f"Say what to do: at least one of {flags} must be given (got none).")


def check_counts(arguments: Any, *names: str) -> None:
    """Raise a ValueError where one of these flags is given and less than 1."""
    for name in names:
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ValueError(f"`{name}` must be at least 1 (got {value}).")
