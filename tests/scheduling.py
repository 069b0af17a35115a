"""Which process of pytest-xdist runs which tests, and which come first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from xdist.scheduler import LoadScopeScheduling

# A process that starts one of these at the end is waited for.
LONGEST = (
    "tests/hub/",
    "tests/modeling/test_compilation.py",
    "tests/modeling/test_tensor_parallel.py",
    "tests/test_documents.py",
    "tests/modeling/test_export.py",
    "tests/test_notebooks.py",
    "tests/examples/test_experiments.py",
    "tests/training/test_processes.py",
    "tests/quickstart/",
    "tests/test_imports.py",
    "tests/test_extras.py",
    "tests/examples/test_no_trainer_resuming.py",
    "tests/modeling/test_open_tokens",
    "tests/modeling/test_old_transformers.py",
    "tests/adapters/test_ftg.py",
)


def longest_first(items: list[Any]) -> None:
    """Bring the tests of the longest files to the front."""
    items.sort(key=lambda item: next(_places(item.nodeid), len(LONGEST)))


def _places(name: str) -> Iterator[int]:
    return (place for place, file in enumerate(LONGEST) if name.startswith(file))


class FilesOfTests(LoadScopeScheduling):
    """A file's tests stay in one process, which makes what they share once. So do the files of the hub,
    whose users are processes that start slowly. Files start in the order of the tests."""

    def __init__(self, config: Any, log: Any = None):
        super().__init__(config, log)
        config.option.loadscopereorder = False

    def _split_scope(self, nodeid: str) -> str:
        return "tests/hub/" if nodeid.startswith("tests/hub/") else nodeid.split("::", 1)[0]
