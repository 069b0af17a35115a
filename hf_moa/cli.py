"""The console command `hf-moa`.

hf-moa quickstart
hf-moa upcycle google-bert/bert-base-uncased ./mae-bert --attention-type mae
hf-moa env --json

Mistakes of the user end in one line on standard error and exit code 2, a quickstart whose
checkpoint does not reload in 1, an interruption in 130; anything unexpected keeps its traceback.
"""

import argparse
import dataclasses
import json
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Slow imports (torch, Trainer) stand inside the commands that need them.

_UPCYCLE_MARKER = "config.json"
# What upcycle takes besides the gating fields.
_HEAD_FIELDS = {
    "num_attention_heads": "heads active per token (default: the source's)",
    "head_dim": "size of one head (default: hidden_size / num_attention_heads)",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: arguments after the program's name; default: those of the process.

    Returns:
        The exit code. (`--help` and unknown options leave through `SystemExit`, as argparse does.)
    """
    args = _parser().parse_args(argv)
    try:
        return args.run(args)
    except KeyboardInterrupt:
        print("\nhf-moa: interrupted; the output folder is as it was before", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        # Messages of the libraries below may span lines.
        print(f"hf-moa {args.command}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hf-moa",
        description="BERT, GPT-2 and T5 whose attention is a mixture of heads and whose layers skip "
        "computation.",
        epilog="example: hf-moa quickstart",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in (_add_quickstart, _add_upcycle, _add_env):
        add(commands)
    return parser


def _add_command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], summary: str, example: str
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=f"example: {example}",
    )
    parser.set_defaults(run=run)
    return parser


def _add_quickstart(commands: Any) -> None:
    parser = _add_command(
        commands,
        "quickstart",
        _quickstart,
        "pretrain, finetune and check a small gated BERT in minutes, on the CPU and offline",
        "hf-moa quickstart --output-dir ./hf-moa-quickstart --seed 1",
    )
    parser.add_argument(
        "--output-dir",
        default="hf-moa-quickstart",
        metavar="DIR",
        help="folder for checkpoints, results and the picture (default: ./%(default)s)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier quickstart in DIR")
    parser.add_argument(
        "--seed", type=int, default=0, help="of splits, weights and order (default: %(default)s)"
    )
    parser.add_argument("--threads", type=int, help="CPU threads (default: the idle CPUs, at most 4)")
    parser.add_argument(
        "--pretrain-epochs", type=float, default=argparse.SUPPRESS, help="passes of pretraining"
    )
    parser.add_argument(
        "--finetune-epochs", type=float, default=argparse.SUPPRESS, help="passes of finetuning"
    )
    parser.add_argument(
        "--max-steps",
        type=int,
        default=argparse.SUPPRESS,
        help="stop either training after this many steps, to try the command out",
    )


def _quickstart(args: argparse.Namespace) -> int:
    from .quickstart.reload import ReloadError
    from .quickstart.run import run_quickstart
    from .quickstart.settings import QuickstartSettings

    settings = QuickstartSettings(**_given(args, QuickstartSettings))
    try:
        run_quickstart(args.output_dir, settings, overwrite=args.overwrite, threads=args.threads)
    except ReloadError as error:
        print(f"hf-moa quickstart: error: {error}", file=sys.stderr)
        return 1
    return 0


def _add_upcycle(commands: Any) -> None:
    parser = _add_command(
        commands,
        "upcycle",
        _upcycle,
        "turn a pretrained BERT, GPT-2 or T5 into a gated one that starts from its weights",
        "hf-moa upcycle google-bert/bert-base-uncased ./mae-bert "
        "--attention-type mae --cct-budgets 1.0 0.5",
    )
    parser.add_argument("source", metavar="SRC", help="folder or Hub id of a checkpoint")
    parser.add_argument("output_dir", metavar="OUT", help="folder for the gated checkpoint")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier checkpoint in OUT")
    head = parser.add_mutually_exclusive_group()
    head.add_argument("--task", help="head to load, such as text-classification")
    head.add_argument("--model-class", help="the same as a class, such as MoaBertForMaskedLM")
    fields = parser.add_argument_group(
        "gating", "Fields of the configuration; those not given keep their defaults."
    )
    from .modeling import configuration_gating as gating

    choices = {
        "attention_type": gating.ATTENTION_TYPES,
        "mae_gate_type": gating.MAE_GATE_TYPES,
        "router_type": gating.ROUTER_TYPES,
        "ffn_type": gating.FFN_TYPES,
        "cct_execution": gating.CCT_EXECUTIONS,
    }
    for name, meaning in _HEAD_FIELDS.items():
        fields.add_argument(
            "--" + name.replace("_", "-"), type=int, default=argparse.SUPPRESS, help=meaning
        )
    hints = typing.get_type_hints(gating.GatingConfig)
    for field in dataclasses.fields(gating.GatingConfig):
        # upcycle admits one value of cct_sublayer_norm; the last are wishes for outputs.
        if field.name == "cct_sublayer_norm" or field.name.startswith("output_"):
            continue
        options = _field_options(field, hints[field.name])
        meaning = _meaning(gating.GatingConfig, field.name)
        options["help"] = f"{meaning} (default: {field.default})".replace("%", "%%")
        if field.name in choices:
            options["choices"] = choices[field.name]
        fields.add_argument("--" + field.name.replace("_", "-"), **options)


def _field_options(field: dataclasses.Field, hint: Any) -> dict[str, Any]:
    """Options of `add_argument` for one field of `GatingConfig`."""
    options: dict[str, Any] = {"default": argparse.SUPPRESS}
    if hint is bool:
        return options | {"action": argparse.BooleanOptionalAction}
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if list in kinds:
        return options | {"type": _budget, "nargs": "+", "metavar": "BUDGET"}
    if types.NoneType in kinds:
        kind = next(kind for kind in kinds if kind is not types.NoneType)
        return options | {"type": _or_none(kind), "metavar": f"{kind.__name__.upper()}|none"}
    return options | {"type": hint}


def _meaning(config_class: type, name: str) -> str:
    """The first sentence on a field in its class's docstring, so that it is written once."""
    entry = re.search(
        rf"^ +{name} \(.*?\):\s(.*?)(?=\n +\w+(?:, \w+)* \(`|\n\n|\Z)",
        config_class.__doc__ or "",  # python -OO keeps none
        flags=re.MULTILINE | re.DOTALL,
    )
    if entry is None:
        return ""
    text = " ".join(entry[1].replace("`", "").split())
    return re.split(r"(?<=[^.]{2}[.:]) (?=[A-Z])", text)[0].rstrip(".:")


def _budget(text: str) -> float | list[float]:
    """`0.5`, or for T5 a pair of encoder and decoder, `1,0.5`."""
    numbers = [float(number) for number in text.split(",")]
    return numbers if len(numbers) > 1 else numbers[0]


_budget.__name__ = "budget"  # what argparse calls it in an error


def _or_none(kind: type) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        return None if text.lower() == "none" else kind(text)

    parse.__name__ = f"{kind.__name__} or none"  # what argparse calls it in an error
    return parse


def _upcycle(args: argparse.Namespace) -> int:
    from . import upcycle
    from .modeling.configuration_gating import GatingConfig
    from .output_folder import output_folder

    fields = _given(args, GatingConfig)
    fields |= {name: value for name, value in vars(args).items() if name in _HEAD_FIELDS}
    with (
        _without_bars(),
        output_folder(args.output_dir, overwrite=args.overwrite, marker=_UPCYCLE_MARKER) as folder,
    ):
        model = upcycle(args.source, task=args.task, model_class=args.model_class, **fields)
        model.save_pretrained(folder)
        tokenizer = _tokenizer_of(args.source)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
    print(
        f"{args.output_dir}: {type(model).__name__}, {model.num_parameters():,} parameters, "
        f"{'with' if tokenizer is not None else 'without'} a tokenizer"
    )
    return 0


@contextmanager
def _without_bars() -> Iterator[None]:
    """Loading and saving take seconds, and an error is to be the only line."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _tokenizer_of(source: str) -> Any:
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


def _add_env(commands: Any) -> None:
    parser = _add_command(
        commands,
        "env",
        _env,
        "print versions, threads and accelerator, for a bug report",
        "hf-moa env --json",
    )
    parser.add_argument("--json", action="store_true", help="as JSON")


def _env(args: argparse.Namespace) -> int:
    from .environment import environment

    facts = environment()
    if args.json:
        print(json.dumps(facts, indent=2))
        return 0
    for name, value in facts.items():
        shown = (", ".join(value) or "none") if isinstance(value, list) else value
        print(f"{name}: {shown}")
    return 0


def _given(args: argparse.Namespace, kind: type) -> dict[str, Any]:
    """Those arguments that were given and are fields of the dataclass `kind`."""
    names = {field.name for field in dataclasses.fields(kind)}
    return {name: value for name, value in vars(args).items() if name in names}
