"""Checkpoints of the loop: where they are, where runs go on, their average."""

from __future__ import annotations

import json
import logging
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from accelerate import DistributedType
from safetensors.torch import load_file
from torch import nn

from .arguments import AccelerateArguments

logger = logging.getLogger(__name__)

MODEL_PARTS = "model_parts"  # of a model that is split over processes
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
    """The checkpoint that the flags name; None to start from scratch.

    Raises:
        ValueError: there is none; or it is to start from scratch, where checkpoints of another run are.
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
    later = [path.name for path in found if _step_of(path) > _step_of(folder)]
    if later:
        raise ValueError(
            f"`resume_from_checkpoint` {folder} is not the last checkpoint in `output_dir` (got later "
            f"ones, {', '.join(later)}, which would be kept and averaged with the new ones): move these "
            "away, or give another `output_dir`."
        )
    return folder


def progress_of(folder: Path, run: Progress, *, is_split: bool) -> Progress:
    """Where the run of a checkpoint was.

    Args:
        run: the one that is to go on from there, at its start.
        is_split: whether it splits its model over processes.

    Raises:
        ValueError: it takes its data in another order; or only one of the two splits its model.
    """
    was_split = (folder / MODEL_PARTS).is_dir()
    if was_split != is_split:
        holds, got, do = "a whole model", "some", "leave them out"
        if was_split:
            holds, got, do = "a model in parts", "none", "give tp_size or fsdp_size"
        raise ValueError(
            f"`resume_from_checkpoint` {folder} holds {holds} (got {got} of the sizes that split one): "
            f"{do}."
        )
    found = Progress(**json.loads((folder / "progress.json").read_text()))
    then, now = found.rows_per_update, run.rows_per_update
    if math.prod(then) != math.prod(now):
        raise ValueError(
            "`per_device_train_batch_size` x `gradient_accumulation_steps` x processes must give as "
            f"many sequences as an update of the run to resume, {_product(then)} (got {_product(now)}): "
            "otherwise its place in the data is lost."
        )
    # of an epoch that is not over, a whole number of updates; of one that is, the last batch may be cut
    batches = found.batches_in_epoch * then[0] * then[2]
    found.batches_in_epoch = math.ceil(batches / (now[0] * now[2]))
    found.rows_per_update = now
    if found.seed is None:  # an older checkpoint
        found.seed = run.seed
    for name in ("seed", "train_sampling_strategy"):
        then, now = getattr(found, name), getattr(run, name)
        if then != now:
            raise ValueError(
                f"`{name}` must be that of the run to resume, {then} (got {now}): the order of the "
                "data follows from it."
            )
    return found


def _product(rows: tuple[int, int, int]) -> str:
    return " x ".join(map(str, rows))


def find_checkpoints(folder: Path) -> list[Path]:
    """The whole checkpoints of a run, the latest last."""
    found = [path for path in folder.glob("*_*") if (path / "progress.json").is_file()]
    found = [path for path in found if _CHECKPOINT.fullmatch(path.name)]
    return sorted(found, key=_step_of)


def _step_of(checkpoint: Path) -> int:
    return json.loads((checkpoint / "progress.json").read_text())["step"]


def check_averaging(
    args: AccelerateArguments,
    *,
    updates: int,
    updates_per_epoch: int,
    distributed_type: DistributedType,
) -> None:
    """Raise a ValueError where there will not be as many checkpoints as are to be averaged."""
    wanted, every = args.average_checkpoints, args.checkpointing_steps
    if not wanted:
        return
    made = updates // (updates_per_epoch if every == "epoch" else int(cast(str, every)))
    if made < wanted:
        raise ValueError(
            f"`average_checkpoints` must be at most {made}, the checkpoints that "
            f"`checkpointing_steps` {every} makes in {updates} updates (got {wanted})."
        )
    what_shards = args.what_shards(distributed_type)
    if what_shards is not None:
        raise ValueError(
            "`average_checkpoints` needs checkpoints that each hold the whole model, which those of "
            f"{what_shards} do not (got {wanted})."
        )


def average_checkpoints(model: nn.Module, folders: list[Path]) -> None:
    """Give a model the means of the weights in some checkpoints."""
    logger.info(f"Averaging {', '.join(folder.name for folder in folders)}.")
    states = [load_file(folder / "model.safetensors") for folder in folders]
    for name, tensor in model.state_dict().items():
        if name in states[0] and tensor.is_floating_point():
            mean = sum(state[name].double() for state in states) / len(states)
            with torch.no_grad():
                tensor.copy_(mean)
