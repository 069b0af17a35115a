"""What somebody may have meant who wrote a name that there is not."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` (did you mean --the_close_one?)`, or nothing where none is close."""
    spelt: dict[str, str] = {}
    for each in known:  # the first spelling of several
        spelt.setdefault(each.replace("-", "_"), each)
    close = get_close_matches(name.replace("-", "_"), spelt, n=1, cutoff=0.75)
    return f" (did you mean --{spelt[close[0]]}?)" if close else ""
