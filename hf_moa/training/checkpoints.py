"""Checkpoints that are either whole or not there, and of the model that goes on from them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from hf_moa.modeling.core.mechanism import shape_field_names

# Uploads and searches for checkpoints pass it over.
STAGING_FOLDER = "_unfinished"
_REPLACED = "replaced-"


@contextmanager
def written_whole(
    folder: str | os.PathLike, accelerator: Accelerator | None = None, *, writes: bool | None = None
) -> Iterator[Path]:
    """Write a folder under another name, and give it its own when it is complete.

    with written_whole("run/checkpoint-100") as folder:
        model.save_pretrained(folder)  # killed here, run/checkpoint-100 does not exist

    The folder takes the place of one of that name.

    Args:
        folder: its path when it is complete.
        accelerator: of a run of several processes, which enter and leave together.
        writes: whether this process makes and renames the folder; default: the main one does.

    Yields:
        The path to write to, an empty folder beside it.
    """
    folder = Path(folder)
    if writes is None:
        writes = accelerator is None or accelerator.is_main_process

    def wait() -> None:
        if accelerator is not None:
            accelerator.wait_for_everyone()

    if writes:
        stage(folder)
    wait()
    staged = folder.parent / STAGING_FOLDER / folder.name
    yield staged
    wait()
    if writes:
        publish(staged, folder)
    wait()


def stage(folder: str | os.PathLike) -> Path:
    """The empty folder in which `folder` is prepared; what a killed run left of it is deleted."""
    folder = Path(folder)
    staged = folder.parent / STAGING_FOLDER / folder.name
    _discard(staged)
    staged.mkdir(parents=True)
    return staged


def publish(staged: Path, folder: str | os.PathLike) -> None:
    """Rename `staged` to `folder`. One that has the name already makes way; killed between the two
    renames, `discard_unfinished` brings it back."""
    folder = Path(folder)
    if folder.exists():
        os.replace(folder, _replaced(staged))
    os.replace(staged, folder)
    _discard(staged)


def discard_unfinished(run_folder: str | os.PathLike) -> None:
    """Delete what a killed run left half written in `run_folder`; what it was about to replace, and is
    missing, comes back."""
    staging = Path(run_folder) / STAGING_FOLDER
    for replaced in staging.glob(f"{_REPLACED}*"):
        _discard(staging / replaced.name.removeprefix(_REPLACED))
    shutil.rmtree(staging, ignore_errors=True)


def _discard(staged: Path) -> None:
    """The same of one folder: others may be written beside it at the same time."""
    folder, replaced = staged.parent.parent / staged.name, _replaced(staged)
    if replaced.exists() and not folder.exists():
        os.replace(replaced, folder)
    for left in (replaced, staged):
        shutil.rmtree(left, ignore_errors=True)
    with suppress(OSError):  # not empty, or not there
        staged.parent.rmdir()


def _replaced(staged: Path) -> Path:
    """What makes way for a folder is kept there, until that has its name."""
    return staged.parent / f"{_REPLACED}{staged.name}"


def check_same_model(folder: str | os.PathLike, config: Any) -> None:
    """Check that a checkpoint is one of a model with this configuration.

    Args:
        folder: of the checkpoint; one without a config.json, as of an adapter, tells nothing.
        config: of the model that goes on.

    Raises:
        ValueError: they differ in what gives the weights their shapes or their meaning.
    """
    path = Path(folder, "config.json")
    if config is None or not path.is_file():
        return
    saved, own = json.loads(path.read_text(encoding="utf-8")), json.loads(json.dumps(config.to_dict()))
    names = dict.fromkeys(
        (
            "model_type",
            "attention_type",
            "ffn_type",
            *shape_field_names(),
            *getattr(config, "backbone_sizes", ()),
        )
    )
    differing = [
        f"{name} {saved.get(name)!r}, and the model {own.get(name)!r}"
        for name in names
        if name in saved.keys() & own.keys() and saved[name] != own[name]
    ]
    if differing:
        raise ValueError(
            f"resume_from_checkpoint must be a checkpoint of this model (got {folder}, which has "
            f"{'; '.join(differing)}). Give another output_dir, or the model that it is of."
        )
