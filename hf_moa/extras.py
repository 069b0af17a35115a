"""Packages that only parts of hf_moa need, which its distribution calls extras."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class MissingExtraError(ImportError):
    """A package is not installed; the message names the extra that brings it."""


@contextmanager
def from_extra(extra: str) -> Iterator[None]:
    """Around imports: where a package is missing, say which extra has it.

    Args:
        extra: such as "train".

    Raises:
        MissingExtraError: a package is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("hf_moa"):
            raise
        raise MissingExtraError(
            f'this needs the package {error.name}, which is missing: pip install "hf-moa[{extra}]"',
            name=error.name,
        ) from error
