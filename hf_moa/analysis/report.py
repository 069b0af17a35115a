"""One report of an analysis: HTML with everything in it, or Markdown with a folder of figures beside.

write_report(analysis, "report.html")
"""

from __future__ import annotations

import base64
import html
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from hf_moa import markdown
from hf_moa.modeling.core.mechanism import MECHANISMS

from . import metrics
from .analyze import Analysis
from .measure import measures_of
from .sections import CODE, Section

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".html", ".md")
_MOST_ROWS = 200


def write_report(analysis: Analysis, path: str | Path, *, title: str | None = None) -> None:
    """Write a report of an analysis.

    Args:
        analysis: of `analyze`.
        path: a file that ends in `.html` (self-contained) or `.md` (with its figures in a folder
            `<name>_figures` beside it). Parents are made; a file there is replaced.
        title: of the report; default: the model's class.

    Raises:
        ValueError: another ending.
        ImportError: matplotlib is missing.
    """
    path = Path(path)
    if path.suffix not in FORMATS:
        raise ValueError(f"path must end in {' or '.join(FORMATS)} (got {path.name!r}).")
    title = title or f"Gates of {analysis.facts['model']}"
    path.parent.mkdir(parents=True, exist_ok=True)
    sections = [section for section in all_sections() if section.table in analysis.tables]
    write = _write_html if path.suffix == ".html" else _write_markdown
    write(analysis, path, title, sections)


def all_sections() -> list[Section]:
    """Those of metrics and of every mechanism's measures."""
    measures = measures_of(MECHANISMS.values())
    return [*metrics.SECTIONS, *(section for measure in measures for section in measure.sections)]


def _write_html(analysis: Analysis, path: Path, title: str, sections: list[Section]) -> None:
    parts = [f"<h1>{html.escape(title)}</h1>", _facts(analysis)]
    links = (f'<a href="#{s.table}">{html.escape(s.title)}</a>' for s in sections)
    parts.append(f"<nav>{' · '.join(links)}</nav>")
    for section in sections:
        table = analysis.tables[section.table]
        parts.append(f'<h2 id="{section.table}">{html.escape(section.title)}</h2>')
        parts.append(f"<p>{html.escape(section.text)}</p>")
        if section.plot is not None:
            picture = base64.b64encode(_svg(section.plot(table), section.table)).decode()
            alt = html.escape(section.title, quote=True)
            parts.append(f'<img alt="{alt}" src="data:image/svg+xml;base64,{picture}">')
        shown = _shown(section, table)
        if shown is not None:
            parts.append(_html_table(shown.head(_MOST_ROWS)))
            parts.append(f"<p>{_left_out(shown)}</p>" if _left_out(shown) else "")
    body = "\n".join(parts)
    path.write_text(_PAGE.format(title=html.escape(title), body=body), encoding="utf-8")


def _write_markdown(analysis: Analysis, path: Path, title: str, sections: list[Section]) -> None:
    figures = path.parent / f"{path.stem}_figures"
    facts = ", ".join(f"{name} {_cell(value)}" for name, value in analysis.facts.items())
    parts = [f"# {title}", f"{facts}."]
    for section in sections:
        table = analysis.tables[section.table]
        parts += [f"## {section.title}", section.text]
        if section.plot is not None:
            figures.mkdir(exist_ok=True)
            (figures / f"{section.table}.svg").write_bytes(_svg(section.plot(table), section.table))
            parts.append(f"![{section.title}]({figures.name}/{section.table}.svg)")
        shown = _shown(section, table)
        if shown is not None:
            parts += [markdown_table(shown.head(_MOST_ROWS)), *filter(None, [_left_out(shown)])]
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def markdown_table(table: pd.DataFrame) -> str:
    """A table in Markdown, floats with three decimals."""
    return markdown.table(map(str, table.columns), table.to_numpy(object), cell=_markdown_text)


def _markdown_text(value: Any) -> str:
    """A cell; tokens are code."""
    pieces = markdown.escaped(_cell(value)).split(CODE)
    for i in range(1, len(pieces), 2):
        mark = "``" if "`" in pieces[i] else "`"
        pieces[i] = f"{mark} {pieces[i]} {mark}" if mark == "``" else f"{mark}{pieces[i]}{mark}"
    return "".join(pieces)


def _shown(section: Section, table: pd.DataFrame) -> pd.DataFrame | None:
    """What the report prints of a table: not what its figure says already."""
    if section.shorten is not None:
        table = section.shorten(table)
    elif section.plot is not None:
        return None
    return table


def _left_out(table: pd.DataFrame) -> str:
    """That a table is longer than what is shown."""
    if len(table) <= _MOST_ROWS:
        return ""
    return f"The first {_MOST_ROWS} of {len(table)} rows: all are in `Analysis.tables`."


def _svg(figure: Figure, name: str) -> bytes:
    import matplotlib

    buffer = io.BytesIO()
    # the same figure is the same file
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def _facts(analysis: Analysis) -> str:
    cells = (
        f"<div><b>{html.escape(_cell(value))}</b><span>{html.escape(name)}</span></div>"
        for name, value in analysis.facts.items()
    )
    return f'<div class="facts">{"".join(cells)}</div>'


def _html_table(table: pd.DataFrame) -> str:
    head = "".join(f"<th>{html.escape(str(name))}</th>" for name in table.columns)
    rows = []
    for row in table.to_numpy(object):
        cells = (
            f'<td class="{"n" if isinstance(value, (int, float)) else "t"}">{_html_text(value)}</td>'
            for value in row
        )
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _html_text(value: Any) -> str:
    """A cell; tokens are code."""
    pieces = html.escape(_cell(value)).split(CODE)
    return "".join(f"<code>{piece}</code>" if i % 2 else piece for i, piece in enumerate(pieces))


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return "" if value != value else f"{value:.3f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; max-width: 62rem; margin: 2rem auto;
       padding: 0 1rem; }}
h1 {{ font-size: 1.7rem; margin-bottom: .4rem; }}
h2 {{ font-size: 1.2rem; margin-top: 2.4rem; border-top: 1px solid #ccc; padding-top: 1rem; }}
p {{ max-width: 46rem; }}
nav {{ font-size: .85rem; margin: 1rem 0; }}
img {{ max-width: 100%; display: block; margin: .6rem 0; }}
table {{ border-collapse: collapse; margin: .8rem 0; font-size: .85rem; }}
th, td {{ padding: .2rem .6rem; border-bottom: 1px solid #ddd; text-align: left; vertical-align: top; }}
td.n {{ text-align: right; font-variant-numeric: tabular-nums; }}
code {{ background: #f0f0f0; padding: 0 .2em; border-radius: 3px; white-space: pre; }}
.facts {{ display: flex; flex-wrap: wrap; gap: .5rem 2rem; }}
.facts b {{ display: block; }}
.facts span {{ color: #555; font-size: .8rem; }}
@media print {{ nav {{ display: none; }} h2 {{ break-after: avoid; }} img {{ break-inside: avoid; }} }}
</style>
</head>
<body>
{body}
</body>
</html>
"""
