"""Output folders that are either whole or not there."""

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def output_folder(
    path: str | Path, *, overwrite: bool, marker: str, parts: tuple[str, ...] = ()
) -> Iterator[Path]:
    """A temporary folder beside `path` that becomes `path` when the block ends without an error. (It is
    in `path`, where that is there and its parent is closed to us.)

    Args:
        path: the folder to write. Missing parents are made.
        overwrite: replace an earlier result in a folder that is not empty. All else that is there
            stays.
        marker: a file that the folder holds when it is an earlier result of the same command. A
            folder without it is refused.
        parts: patterns of files that an earlier result may have and the new one may lack. They go, where
            they are in the folder itself.

    Yields:
        The temporary folder. After an error or an interruption it is removed, and `path` is as it
        was.

    Raises:
        ValueError: `path` is a file; it is not empty and `overwrite` is False; it lacks `marker`.
    """
    path = Path(path).absolute()
    _check(path, overwrite=overwrite, marker=marker)
    path.parent.mkdir(parents=True, exist_ok=True)
    is_closed = path.is_dir() and not os.access(path.parent, os.W_OK)
    work = (path if is_closed else path.parent) / f".{path.name}-{secrets.token_hex(4)}.partial"
    work.mkdir()  # with everybody's rights to it, where `tempfile`'s folders are only for their owner
    try:
        yield work
        # Somebody may have filled it meanwhile.
        _check(path, overwrite=overwrite, marker=marker, work=work)
        _put_in_place(work, path, parts)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _check(path: Path, *, overwrite: bool, marker: str, work: Path | None = None) -> None:
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} must be a folder (got a file); give another path")
    if not path.exists() or all(entry == work for entry in path.iterdir()):
        return
    if not overwrite:
        raise ValueError(f"{path} is not empty; give another folder, or --overwrite to replace it")
    if not (path / marker).is_file():
        raise ValueError(
            f"{path} is not empty and holds no {marker}, so it is no earlier result to overwrite; "
            "give another folder"
        )


def _put_in_place(work: Path, path: Path, parts: tuple[str, ...]) -> None:
    if not path.exists():
        work.rename(path)
        return
    # The folder itself stays: it may be someone's working directory, a link or a mount point.
    new = list(work.iterdir())
    replaced = {entry.name for entry in new}
    old = [
        entry
        for entry in path.iterdir()
        if entry.name in replaced or any(entry.match(part) for part in parts)
    ]
    aside = Path(tempfile.mkdtemp(prefix=".", suffix=".replaced", dir=path))
    try:
        for entry in old:
            entry.rename(aside / entry.name)
        try:
            for entry in new:
                shutil.move(entry, path / entry.name)  # copies, to another file system
        except BaseException:
            for entry in new:
                _remove(path / entry.name)
            raise
    except BaseException:
        for entry in aside.iterdir():
            entry.rename(path / entry.name)
        aside.rmdir()
        raise
    shutil.rmtree(aside)


def _remove(entry: Path) -> None:
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry)
    else:
        entry.unlink(missing_ok=True)


def check_writable(path: Path, flag: str) -> None:
    """Check that a file can be written, before the work that it is to hold.

    Raises:
        ValueError: its folder cannot be made or written to, or it is a folder itself.
    """
    folder = next(each for each in path.absolute().parents if each.exists())
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"{flag} must be a file that can be written in {folder} (got {path})")
