"""Telling gated models and their parts, also those of a checkpoint's own code.

A checkpoint that was loaded with `trust_remote_code=True` before `import hf_moa` has classes of its own,
which have the names of the package's.
"""

from __future__ import annotations

from typing import Any


def is_one(thing: Any, kind: type) -> bool:
    """Whether `thing` is an instance of the package's class `kind`, or of its namesake in a checkpoint's
    own code."""
    return any(each.__name__ == kind.__name__ for each in type(thing).__mro__)
