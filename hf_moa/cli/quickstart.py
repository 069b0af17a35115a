"""`hf-moa quickstart`: the package's main job in minutes, on the CPU and offline."""

import argparse
import sys
from typing import Any

from .command import add_command, given


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "quickstart",
        run,
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
        "--pretrain-epochs",
        type=float,
        default=argparse.SUPPRESS,
        help="passes of pretraining (default: 2)",
    )
    parser.add_argument(
        "--finetune-epochs",
        type=float,
        default=argparse.SUPPRESS,
        help="passes of finetuning (default: 10)",
    )
    parser.add_argument(
        "--max-steps",
        type=int,
        default=argparse.SUPPRESS,
        help="stop either training after this many steps, to try the command out (default: no limit)",
    )


def run(args: argparse.Namespace) -> int:
    from hf_moa.quickstart.reload import ReloadError
    from hf_moa.quickstart.run import run_quickstart
    from hf_moa.quickstart.settings import QuickstartSettings

    settings = QuickstartSettings(**given(args, QuickstartSettings))
    try:
        run_quickstart(args.output_dir, settings, overwrite=args.overwrite, threads=args.threads)
    except ReloadError as error:
        print(f"hf-moa quickstart: error: {error}", file=sys.stderr)
        return 1
    return 0
