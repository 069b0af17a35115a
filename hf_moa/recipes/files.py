"""Files that the scripts read, plain or compressed: lines of text, or rows of JSON or CSV."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO


def open_text(path: str, flag: str, holds: str = "text file, plain or .gz") -> TextIO:
    """A UTF-8 file, plain or .gz, to be read.

    Raises:
        ValueError: there is no such file; the message names `flag` and says what it `holds`.
    """
    if not Path(path).is_file():
        raise ValueError(f"`{flag}` must be a {holds} (got {path}: no such file).")
    opened = gzip.open if path.endswith(".gz") else open
    # a single carriage return ends no line: files that are parallel to this one may have none
    return opened(path, "rt", encoding="utf-8-sig", newline="\n")


def read_lines(path: str, flag: str) -> list[str]:
    """The lines of a UTF-8 text file, plain or .gz, each with its end, which is one newline.

    Raises:
        ValueError: there is no such file, or it is empty; the message names `flag`.
    """
    with open_text(path, flag) as file:
        lines = [f"{line[:-2]}\n" if line.endswith("\r\n") else line for line in file]
    if not lines:
        raise ValueError(f"`{flag}` must hold text (got {path}, which is empty).")
    return lines


def is_table(path: str) -> bool:
    """Whether a file's name says that it holds rows of several columns, not lines of text."""
    return _kind(path) in (".csv", ".json", ".jsonl")


def _kind(path: str) -> str:
    return Path(path.removesuffix(".gz")).suffix


def read_rows(path: str, flag: str) -> list[dict]:
    """The rows of a file, plain or .gz: .csv with a header, or JSON objects, a line each or in a list.

    Raises:
        ValueError: it holds something else; the message names `flag`.
    """
    lines = read_lines(path, flag)
    if _kind(path) == ".csv":
        csv.field_size_limit(2**31 - 1)  # the most that fits everywhere
        rows = list(csv.DictReader(lines))
    elif lines[0].lstrip().startswith("["):
        rows = _parse(["".join(lines)], path, flag)[0]
    else:
        rows = _parse(lines, path, flag)
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"`{flag}` must hold rows of named columns (got {path}).")
    return rows


def _parse(texts: list[str], path: str, flag: str) -> list:
    try:
        return [json.loads(text) for text in texts if text.strip()]
    except json.JSONDecodeError as error:
        raise ValueError(
            f"`{flag}` must hold a JSON object a line, or a list of them (got {path}: {error})."
        ) from error


def text_column(rows: Iterable[dict], flag: str) -> list[str]:
    """The texts in the column `text`, or else in the first one.

    Raises:
        ValueError: a row has none; the message names `flag`.
    """
    texts, name = [], None
    for i, row in enumerate(rows):
        if name is None:
            name = "text" if "text" in row else next(iter(row), "text")
        if not isinstance(row.get(name), str):
            raise ValueError(f"`{flag}` must have a text in the column {name!r} (row {i} is {row!r}).")
        texts.append(row[name])
    return texts
