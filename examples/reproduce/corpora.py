"""Texts of the experiments: published files of a folder, or data sets of the Hub.

The folder has one for each corpus: `multi30k` (`train.en`, `train.de`, `val.*`, `test_2016_flickr.*`),
`tatoeba-en-de` (`deu.txt`, the German pairs of manythings.org), `wikitext-2` and `wikitext-103`
(`train.txt`, `valid.txt`, `test.txt`; of WikiText-103's training text the results here are of the first
9,742 lines); any file may be a `.gz`.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable
from pathlib import Path

Flags = dict[str, str]
Pair = tuple[str, str]

WIKITEXT_103_LINES = 9_742  # of the training text: its first 542,000 words
TATOEBA_HELD_OUT = 1_000  # English sentences, about, of the validation and of the test text
_SPLITS = ("train", "validation", "test")


def multi30k(data_dir: str | None, work_dir: str | Path) -> Flags:
    """Paths of English and German, as `<split>_source` and `<split>_target`.

    Args:
        data_dir: folder of the corpora; None for the Hub, whose texts are written to `work_dir`.
    """
    if data_dir is None:
        pairs = {"source": "en", "target": "de"}
        return _from_hub("bentrevett/multi30k", None, pairs, Path(work_dir, "multi30k"))
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
    paths = {
        f"{split}_{side}": folder / f"{split}_{side}.txt"
        for split in _SPLITS
        for side in ("source", "target")
    }
    if not all(path.is_file() for path in paths.values()):
        folder.mkdir(parents=True, exist_ok=True)
        path = find_file(Path(data_dir, "tatoeba-en-de"), "deu.txt")
        pairs = [tuple(line.split("\t")[:2]) for line in read_lines(path)]
        for split, found in split_by_source(pairs).items():
            for side, texts in zip(("source", "target"), zip(*found, strict=True), strict=True):
                _write(paths[f"{split}_{side}"], texts)
    return {name: str(path) for name, path in paths.items()}


def split_by_source(pairs: list[Pair]) -> dict[str, list[Pair]]:
    """Pairs for training, validation and test, so that no source is in two of them.

    Which one follows from only the source. Training leaves out the targets that are held out, too.
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
    held_out = {target for split in _SPLITS[1:] for _, target in found[split]}
    found["train"] = [pair for pair in found["train"] if pair[1] not in held_out]
    return found


def wikitext(name: str, data_dir: str | None, work_dir: str | Path) -> Flags:
    """Paths of the training, validation and test text, as `train`, ...

    Args:
        name: "wikitext-2" or "wikitext-103".
        data_dir, work_dir: of `multi30k`.
    """
    if data_dir is None:
        lines = WIKITEXT_103_LINES if name == "wikitext-103" else None
        folder = Path(work_dir, name)
        return _from_hub("Salesforce/wikitext", f"{name}-v1", {"": "text"}, folder, train_lines=lines)
    stems = dict(zip(_SPLITS, ("train", "valid", "test"), strict=True))
    folder = Path(data_dir, name)
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


def _from_hub(
    name: str,
    configuration: str | None,
    columns: dict[str, str],
    folder: Path,
    *,
    train_lines: int | None = None,
) -> Flags:
    """Write the splits of a data set to the folder, once.

    Args:
        columns: part of the files' names -> column.
        train_lines: of the training split, from its beginning; default: all.
    """
    paths = {
        f"{split}_{part}".rstrip("_"): folder / f"{split}_{part}.txt"
        for split in _SPLITS
        for part in columns
    }
    if not all(path.is_file() for path in paths.values()):
        from datasets import load_dataset

        splits = load_dataset(name, configuration)
        folder.mkdir(parents=True, exist_ok=True)
        for split in _SPLITS:
            for part, column in columns.items():
                count = train_lines if split == "train" else None
                _write(paths[f"{split}_{part}".rstrip("_")], splits[split][column][:count])
    return {key: str(path) for key, path in paths.items()}


def _write(path: Path, texts: Iterable[str]) -> None:
    lines = (text.rstrip("\n") + "\n" for text in texts)
    path.write_text("".join(lines), encoding="utf-8")
