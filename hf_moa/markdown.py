"""Tables in Markdown.

print(table(["budget", "loss"], [[1, 0.25], [0.5, None]]))
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import dropwhile, takewhile
from typing import Any

_BETWEEN_CELLS = re.compile(r"(?<!\\)\|")
# A heading of the second level; or a block of code, in which there is none.
_HEADING = re.compile(r"^ {0,3}(```+|~~~+).*?(?:^ *\1|\Z)|^## ([^\n]*)", flags=re.DOTALL | re.MULTILINE)


def escaped(text: str) -> str:
    """Text without what would end a cell or its line."""
    return " ".join(text.replace("|", "\\|").split())


def cell(value: Any) -> str:
    """A value in a table: floats with four significant digits, None as nothing."""
    if value is None:
        return ""
    return escaped(f"{value:.4g}" if isinstance(value, float) else str(value))


def table(
    columns: Iterable[str], rows: Iterable[Iterable[Any]], *, cell: Callable[[Any], str] = cell
) -> str:
    """A table.

    Args:
        columns: their names.
        rows: of values, one for each column.
        cell: value -> the text of its cell, which is `escaped`.
    """
    columns = list(columns)
    lines = [columns, *([cell(value) for value in row] for row in rows)]
    head, *body = (f"| {' | '.join(line)} |" for line in lines)
    return "\n".join([head, "|" + "---|" * len(columns), *body])


def read_table(text: str) -> list[dict[str, str]]:
    """The rows of the first table in a text, as `table` writes them: column -> the text of its cell."""
    lines = list(dropwhile(lambda line: not line.startswith("|"), text.splitlines()))
    lines = [line for line in takewhile(lambda line: line.startswith("|"), lines) if line[1] == " "]
    head, *body = [_BETWEEN_CELLS.split(line.strip()[1:-1]) for line in lines] or [[]]
    names = [name.strip() for name in head]
    cells = ([value.strip().replace("\\|", "|") for value in row] for row in body)
    return [dict(zip(names, row, strict=True)) for row in cells if len(row) == len(names)]


def union_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table whose columns are all keys of the rows, in the order in which they come up."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    return table(columns, ([row.get(key) for key in columns] for row in rows))


def split_sections(text: str) -> tuple[str, list[tuple[str, str]]]:
    """What precedes the first heading of the second level; then each such heading with its text."""
    found = [match for match in _HEADING.finditer(text) if match[2] is not None]
    ends = [match.start() for match in found] + [len(text)]
    bodies = [text[match.end() : end] for match, end in zip(found, ends[1:], strict=True)]
    return text[: ends[0]], [(match[2].strip(), body) for match, body in zip(found, bodies, strict=True)]
