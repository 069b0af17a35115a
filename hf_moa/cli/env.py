"""`hf-moa env`: what a bug report needs to say."""

import argparse
import json
from typing import Any

from .command import add_command


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "env",
        run,
        "print versions, threads and accelerator, for a bug report",
        "hf-moa env --json",
    )
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(args: argparse.Namespace) -> int:
    from hf_moa.environment import environment

    facts = environment()
    if args.json:
        print(json.dumps(facts, indent=2))
        return 0
    for name, value in facts.items():
        shown = ", ".join(value) if isinstance(value, list) else value
        print(f"{name}: {shown or 'none'}")
    return 0
