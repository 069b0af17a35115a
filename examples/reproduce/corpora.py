"""Texts of the experiments: published files of a folder, or data sets of the Hub.

The folder has one for each corpus: `multi30k` (`train.en`, `train.de`, `val.*`, `test_2016_flickr.*`),
`tatoeba-en-de` (`deu.txt`, the German pairs of manythings.org), `wikitext-2` (`train.txt`, `valid.txt`,
`test.txt`); any file may be a `.gz`.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable
from pathlib import Path

Flags = dict[str, str]
Pair = tuple[str, str]

TATOEBA_HELD_OUT = 1_000  # English sentences, about, of the validation and of the test text
_SPLITS = ("train", "validation", "test")


def multi30k(data_dir: str | None, work_dir: str | Path) -> Flags:
    """Paths of English and German, as `<split>_source` and `<split>_target`.

    Args:
        data_dir: folder of the corpora; None for the Hub, whose texts are written to `work_dir`.
    """
    if data_dir is None:
        return _from_hub(work_dir)
    stems = dict(zip(_SPLITS, ("train", "val", "test_2016_flickr"), strict=True))
    folder = Path(data_dir, "multi30k")
    return {
        f"{split}_{side}": str(find_file(folder, f"{stem}.{language}"))
        for split, stem in stems.items()
        for side, language in (("source", "en"), ("target", "de"))
    }


def tatoeba(data_dir: str | None, work_dir: str | Path) -> Flags:
    """The same of Tatoeba, whose pairs are written to `work_dir`, split by their English sentence.

    Of a held-out sentence the first translation is kept.
    """
    if data_dir is None:
        raise ValueError("`data_dir` must be the folder of tatoeba-en-de/deu.txt (got None).")
    folder = Path(work_dir, "tatoeba")
    if not all(path.is_file() for path in _paths(folder).values()):
        path = find_file(Path(data_dir, "tatoeba-en-de"), "deu.txt")
        pairs = [tuple(line.split("\t")[:2]) for line in read_lines(path)]
        for split, found in split_by_source(pairs).items():
            _write(folder, split, found)
    return {name: str(path) for name, path in _paths(folder).items()}


def split_by_source(pairs: list[Pair]) -> dict[str, list[Pair]]:
    """Pairs for training, validation and test, so that no source is in two of them.

    Which one follows from the source alone.
    """
    sources = {source for source, _ in pairs}
    share = max(3, len(sources) // TATOEBA_HELD_OUT)
    found: dict[str, list[Pair]] = {split: [] for split in _SPLITS}
    seen: set[str] = set()
    for source, target in pairs:
        draw = zlib.crc32(source.encode()) % share
        split = {0: "test", 1: "validation"}.get(draw, "train")
        if split == "train" or source not in seen:
            found[split].append((source, target))
        seen.add(source)
    return found


def wikitext2(data_dir: str) -> Flags:
    """Paths of the training, validation and test text of WikiText-2."""
    folder = Path(data_dir, "wikitext-2")
    stems = dict(zip(_SPLITS, ("train", "valid", "test"), strict=True))
    return {split: str(find_file(folder, f"{stem}.txt")) for split, stem in stems.items()}


def find_file(folder: Path, name: str) -> Path:
    """The file, or its `.gz`.

    Raises:
        ValueError: there is neither.
    """
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise ValueError(f"`data_dir` must hold {folder.name}/{name} or its .gz (got none in {folder}).")


def read_lines(path: str | Path) -> list[str]:
    """The lines of a text file, plain or .gz, without their ends."""
    opened = gzip.open if str(path).endswith(".gz") else open
    with opened(path, "rt", encoding="utf-8") as file:
        return [line.rstrip("\r\n") for line in file]


def _from_hub(work_dir: str | Path) -> Flags:
    from datasets import load_dataset

    folder = Path(work_dir, "multi30k")
    if not all(path.is_file() for path in _paths(folder).values()):
        for split, rows in load_dataset("bentrevett/multi30k").items():
            _write(folder, split, zip(rows["en"], rows["de"], strict=True))
    return {name: str(path) for name, path in _paths(folder).items()}


def _paths(folder: Path) -> dict[str, Path]:
    names = [f"{split}_{side}" for split in _SPLITS for side in ("source", "target")]
    return {name: folder / f"{name}.txt" for name in names}


def _write(folder: Path, split: str, pairs: Iterable[Pair]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    sources, targets = zip(*pairs, strict=True)
    for side, texts in (("source", sources), ("target", targets)):
        text = "".join(f"{text}\n" for text in texts)
        (folder / f"{split}_{side}.txt").write_text(text, encoding="utf-8")
