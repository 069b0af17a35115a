"""Types in docstrings as transformers writes them, "name (`int` or `None`, defaults to `None`)", in the
form that the site's tool reads: "name (int | None)". Defaults of a dataclass stand in its signature."""

from __future__ import annotations

import re

import griffe

_ENTRY = re.compile(
    r"^(?P<names>\s+[\w, ]+) \((?P<kind>`[^\n]+?)"
    r"(?:, (?:\*optional\*|defaults? to (?P<default>[^\n]+)))?\):",
    flags=re.MULTILINE,
)


def plain_types(docstring: str, *, with_defaults: bool) -> str:
    def entry(match: re.Match) -> str:
        kind = match["kind"].replace("`", "").replace(" or ", " | ")
        default = f" Default: {match['default']}." if with_defaults and match["default"] else ""
        return f"{match['names']} ({kind}):{default}"

    return _ENTRY.sub(entry, docstring)


class PlainTypes(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **kwargs) -> None:
        if obj.docstring is not None:
            decorators = [str(decorator.value) for decorator in getattr(obj, "decorators", [])]
            is_dataclass = any("dataclass" in decorator for decorator in decorators)
            obj.docstring.value = plain_types(obj.docstring.value, with_defaults=not is_dataclass)
