"""Checkpoints that are either whole or not there: a killed run loses nothing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from accelerate import Accelerator

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
        discard_unfinished(folder.parent)
    wait()


def stage(folder: str | os.PathLike) -> Path:
    """The empty folder in which `folder` is prepared; what a killed run left there is deleted."""
    folder = Path(folder)
    discard_unfinished(folder.parent)
    staged = folder.parent / STAGING_FOLDER / folder.name
    staged.mkdir(parents=True)
    return staged


def publish(staged: Path, folder: str | os.PathLike) -> None:
    """Rename `staged` to `folder`. One that has the name already makes way; killed between the two
    renames, `discard_unfinished` brings it back."""
    folder = Path(folder)
    if folder.exists():
        replaced = staged.parent / f"{_REPLACED}{folder.name}"
        os.replace(folder, replaced)
    os.replace(staged, folder)


def discard_unfinished(run_folder: str | os.PathLike) -> None:
    """Delete what a killed run left half written in `run_folder`; what it was about to replace, and is
    missing, comes back."""
    staging = Path(run_folder) / STAGING_FOLDER
    for replaced in staging.glob(f"{_REPLACED}*"):
        folder = Path(run_folder) / replaced.name.removeprefix(_REPLACED)
        if not folder.exists():
            os.replace(replaced, folder)
    shutil.rmtree(staging, ignore_errors=True)
