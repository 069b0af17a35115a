"""Which names can be ids of repositories on the Hub."""

from __future__ import annotations

import os
from pathlib import Path

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id


def is_hub_id(name: str | None) -> bool:
    """Whether `name` can be the id of a repository on the Hub. (So can a relative path.)"""
    try:
        validate_repo_id(name or "")
    except HFValidationError:
        return False
    return True


def hub_name(name: str | None) -> str | None:
    """The name, where it can be an id on the Hub and is no path on this machine; else None."""
    # the second is transformers' for weights from memory
    if not name or name == "None" or not is_hub_id(name):
        return None
    return None if Path(name).exists() else name


def check_source(name: str | os.PathLike, field: str = "The checkpoint") -> None:
    """Check that a model can be there, before transformers asks the Hub for what is a path.

    Args:
        name: a path, or an id on the Hub.
        field: what the message calls it.

    Raises:
        ValueError: there is no such path, and it can be no id.
    """
    if not Path(name).exists() and not is_hub_id(str(name)):
        raise ValueError(
            f"{field} must be a folder on this machine, or an id on the Hub such as 'user/name' (got "
            f"{str(name)!r}: there is no such folder)."
        )
