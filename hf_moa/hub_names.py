"""Which names can be ids of repositories on the Hub."""

from __future__ import annotations

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
