"""Reading JSON files, with errors that say which file holds what it should not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_json(path: Path) -> Any:
    """What a JSON file holds.

    Raises:
        ValueError: there is no such file, or it does not hold JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"There is no file {path}; give the path of a JSON file.") from error
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} must hold JSON ({error}).") from error


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; a ValueError where it holds something else."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object (got a {type(value).__name__}).")
    return value
