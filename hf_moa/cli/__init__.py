"""The console command `hf-moa`.

hf-moa quickstart
hf-moa shrink ./my-bert ./my-bert-sizes --train-file train.tsv --text-column sentence
hf-moa upcycle google-bert/bert-base-uncased ./bert-mae --attention-type mae
hf-moa analyze ./bert-mae --data dev.tsv --text-column sentence
hf-moa benchmark ./bert-mae
hf-moa card ./bert-mae --license apache-2.0
hf-moa env --json

Mistakes of the user end in one line on standard error and exit code 2, a quickstart whose
checkpoint does not reload in 1, an interruption in 130; anything unexpected keeps its traceback.

`--help` waits neither for torch nor for transformers: slow packages are imported inside the functions
that carry a command out, and the console script enters through `hf_moa_cli.py`, which says the rest.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from hf_moa import __version__
from hf_moa.extras import MissingExtraError
from hf_moa.misspelt import did_you_mean

from . import analyze, benchmark, card, env, quickstart, shrink, upcycle


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: arguments after the program's name; default: those of the process.

    Returns:
        The exit code. (`--help` and unknown options leave through `SystemExit`, as argparse does.)
    """
    args = _parse(argv)
    try:
        return args.run(args)
    except KeyboardInterrupt:
        print("\nhf-moa: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever reads, as `head`, has enough
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for the interpreter's last flush
        return 0
    except (ValueError, OSError, MissingExtraError) as error:
        # Messages of the libraries below may span lines.
        print(f"hf-moa {args.command}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments; unknown options leave with those that they resemble."""
    parser, commands = _parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        command = commands.choices[args.command]
        known = [name.removeprefix("--") for name in command._option_string_actions]
        named = " ".join(f"{each}{did_you_mean(each.removeprefix('--'), known)}" for each in unknown)
        command.error(f"unrecognized arguments: {named}")
    return args


def _parser() -> tuple[argparse.ArgumentParser, Any]:
    """The parser, and its commands'."""
    parser = argparse.ArgumentParser(
        prog="hf-moa",
        description="BERT, GPT-2 and T5 whose attention is a mixture of heads and whose layers skip "
        "computation.",
        epilog="example: hf-moa quickstart",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (quickstart, upcycle, shrink, analyze, benchmark, card, env):
        command.add(commands)
    return parser, commands
