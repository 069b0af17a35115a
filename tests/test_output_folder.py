import errno
import os
from pathlib import Path

import pytest

from hf_moa import output_folder as output_folder_module
from hf_moa.output_folder import output_folder


def write(path, *, overwrite=False, names=("config.json",)):
    with output_folder(path, overwrite=overwrite, marker="config.json") as folder:
        for name in names:
            (folder / name).write_text("new")


def test_folder_appears_with_its_parents_when_all_is_written(tmp_path):
    target = tmp_path / "a" / "b"
    with output_folder(target, overwrite=False, marker="config.json") as folder:
        (folder / "config.json").write_text("new")
        assert not target.exists()
    assert (target / "config.json").read_text() == "new"
    assert [entry.name for entry in target.parent.iterdir()] == ["b"]


def test_empty_folder_is_filled_in_place(tmp_path):
    target = tmp_path / "out"
    target.mkdir()
    inode = target.stat().st_ino
    write(target)
    assert (target / "config.json").read_text() == "new"
    assert target.stat().st_ino == inode


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_nothing_is_left_after_an_error(tmp_path, error):
    def fail():
        with output_folder(tmp_path / "out", overwrite=False, marker="config.json") as folder:
            (folder / "config.json").write_text("half")
            raise error

    with pytest.raises(error):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_earlier_result_survives_an_error_in_overwriting(tmp_path):
    write(tmp_path / "out")

    def fail():
        with output_folder(tmp_path / "out", overwrite=True, marker="config.json"):
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert (tmp_path / "out" / "config.json").read_text() == "new"


def test_full_folder_is_refused(tmp_path):
    (tmp_path / "note.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"not empty.*--overwrite"):
        write(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["note.txt"]


def test_overwriting_replaces_what_is_written_and_no_more(tmp_path):
    target = tmp_path / "out"
    (target / "shards").mkdir(parents=True)
    for name in ("config.json", "shards/1", "model-1.bin", "mine.bin"):
        (target / name).write_text("old")
    with output_folder(target, overwrite=True, marker="config.json", parts=("model-*.bin",)) as folder:
        (folder / "config.json").write_text("new")
    assert sorted(entry.name for entry in target.iterdir()) == ["config.json", "mine.bin", "shards"]
    assert (target / "config.json").read_text() == "new"
    assert (target / "shards" / "1").read_text() == "old"


@pytest.mark.parametrize("failing", [1, 2, 3, 4])
def test_earlier_result_survives_an_error_in_putting_the_new_one_in_place(
    tmp_path, monkeypatch, failing
):
    target = tmp_path / "out"
    (target / "shards").mkdir(parents=True)
    for name in ("config.json", "other.json", "shards/1"):
        (target / name).write_text("old")
    moves = []

    def move(source, destination, original):
        moves.append(source)
        if len(moves) == failing:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(source, destination)

    rename, shutil_move = Path.rename, output_folder_module.shutil.move
    monkeypatch.setattr(Path, "rename", lambda *paths: move(*paths, rename))
    monkeypatch.setattr(output_folder_module.shutil, "move", lambda *paths: move(*paths, shutil_move))
    with pytest.raises(OSError, match="No space left"):
        write(target, overwrite=True, names=("config.json", "other.json"))
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]
    assert sorted(entry.name for entry in target.iterdir()) == ["config.json", "other.json", "shards"]
    for name in ("config.json", "other.json", "shards/1"):
        assert (target / name).read_text() == "old"


def test_folder_on_another_file_system_is_replaced(tmp_path, monkeypatch):
    """As where the path is a link to one, or a mount point."""
    write(tmp_path / "real")
    target = tmp_path / "elsewhere" / "out"
    target.parent.mkdir()
    target.symlink_to(tmp_path / "real")
    rename = os.rename

    def refuse_to_cross(source, destination, **kwargs):
        if ".partial" in str(source):
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        return rename(source, destination, **kwargs)

    monkeypatch.setattr(os, "rename", refuse_to_cross)
    with output_folder(target, overwrite=True, marker="config.json") as folder:
        (folder / "config.json").write_text("newer")
        (folder / "shards").mkdir()
        (folder / "shards" / "1").write_text("newer")
    assert target.is_symlink()
    assert sorted(entry.name for entry in target.iterdir()) == ["config.json", "shards"]
    assert (target / "config.json").read_text() == (target / "shards" / "1").read_text() == "newer"
    assert [entry.name for entry in target.parent.iterdir()] == ["out"]


def test_overwriting_refuses_a_folder_of_something_else(tmp_path):
    (tmp_path / "note.txt").write_text("mine")
    with pytest.raises(ValueError, match="no earlier result"):
        write(tmp_path, overwrite=True)
    assert (tmp_path / "note.txt").read_text() == "mine"


def test_file_is_refused(tmp_path):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(ValueError, match="must be a folder"):
        write(tmp_path / "out", overwrite=True)


def test_result_has_the_rights_that_others_have(tmp_path):
    (tmp_path / "other").mkdir()
    write(tmp_path / "out")
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "other").stat().st_mode


@pytest.mark.parametrize("earlier", [False, True])
def test_folder_whose_parent_is_closed(tmp_path, monkeypatch, earlier):
    """As a mount point in a container may be."""
    target = tmp_path / "out"
    target.mkdir()
    if earlier:
        (target / "config.json").write_text("old")
    made = Path.mkdir

    def mkdir(path, *args, **kwargs):
        if path.parent == tmp_path and not path.exists():
            raise PermissionError(errno.EACCES, "closed", str(path))
        return made(path, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    write(target, overwrite=earlier)
    assert [entry.name for entry in target.iterdir()] == ["config.json"]
    assert (target / "config.json").read_text() == "new"
