"""Where the checkpoints of a `run_*_no_trainer.py` script are, and where a run goes on."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from accelerate_arguments import AccelerateArguments

_CHECKPOINT = re.compile(r"(step|epoch)_(\d+)")


@dataclass
class Progress:
    """Where a run is: enough to go on from a checkpoint."""

    step: int = 0
    epoch: int = 0
    batches_in_epoch: int = 0
    tokens: int = 0
    rows_per_update: tuple[int, int, int] = (0, 0, 0)  # in a batch, in how many, on how many processes
    seed: int | None = None
    train_sampling_strategy: str = "random"


def checkpoint_to_resume(args: AccelerateArguments) -> Path | None:
    """The checkpoint that the flags name; None to start anew.

    Raises:
        ValueError: there is none; or it is to start anew, where checkpoints of another run are.
    """
    found = find_checkpoints(Path(args.output_dir))
    if args.resume_from_checkpoint is None:
        if found:
            raise ValueError(
                f"`output_dir` {args.output_dir} holds checkpoints of another run: go on from the last "
                "with --resume_from_checkpoint latest, or give another folder."
            )
        return None
    if args.resume_from_checkpoint == "latest":
        return found[-1] if found else None
    folder = Path(args.resume_from_checkpoint)
    if not (folder / "progress.json").is_file():
        raise ValueError(
            f"`resume_from_checkpoint` must be a checkpoint of this script (got {folder}, which has no "
            "progress.json)."
        )
    return folder


def find_checkpoints(folder: Path) -> list[Path]:
    """The whole checkpoints of a run, the latest last."""
    found = [path for path in folder.glob("*_*") if (path / "progress.json").is_file()]
    found = [path for path in found if _CHECKPOINT.fullmatch(path.name)]
    return sorted(found, key=lambda path: json.loads((path / "progress.json").read_text())["step"])
