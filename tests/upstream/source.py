"""The tests that transformers ships with its source distribution, made importable as package `tests`.

A source distribution holds `tests/test_*.py` and none of the folders beside them. What those files
import from the folders is stood in for here where the folder is missing; a full source tree of
transformers has it all, and is then used as it is.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tarfile
import types
from pathlib import Path

import transformers

# Fields that every configuration has, away from their defaults.
COMMON_FIELDS = {
    "return_dict": False,
    "output_hidden_states": True,
    "output_attentions": True,
    "dtype": "float16",
    "chunk_size_feed_forward": 5,
    "architectures": ["SomeModel"],
    "id2label": {0: "none", 1: "some", 2: "all"},
    "label2id": {"none": 0, "some": 1, "all": 2},
    "problem_type": "regression",
}


def download(cache: Path) -> Path:
    """The source distribution of the installed transformers, unpacked under `cache`.

    Raises:
        RuntimeError: pip cannot fetch it.
    """
    name = f"transformers-{transformers.__version__}"
    unpacked = cache / name
    if not unpacked.exists():
        cache.mkdir(parents=True, exist_ok=True)
        requirement = f"transformers=={transformers.__version__}"
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:"]
        if subprocess.run([*command, "--dest", str(cache), requirement]).returncode != 0:
            raise RuntimeError(
                f"pip could not download {requirement}; pass the path of an unpacked one."
            )
        with tarfile.open(cache / f"{name}.tar.gz") as archive:
            archive.extractall(cache, filter="data")
    return unpacked


def install(source: Path) -> None:
    """Make `source/tests` importable as package `tests`.

    Raises:
        ValueError: `source` holds no tests of transformers, or those of another version.
    """
    if not (source / "tests" / "test_modeling_common.py").exists():
        raise ValueError(f"SOURCE must be a source tree of transformers (got {str(source)!r}).")
    info = source / "PKG-INFO"
    version = f"\nVersion: {transformers.__version__}\n"
    if info.exists() and version not in info.read_text(encoding="utf-8"):
        raise ValueError(
            f"SOURCE must be of the installed version {transformers.__version__} (got {str(source)!r})."
        )
    # The configuration tests import transformers from beside their `__init__.py`, which is not shipped.
    transformers.utils.direct_transformers_import = lambda *args, **kwargs: transformers
    package = types.ModuleType("tests")
    package.__path__ = [str(source / "tests")]
    sys.modules["tests"] = package
    _stand_in("tests.exporters.test_export", ExportTesterMixin=type("ExportTesterMixin", (), {}))
    _stand_in("tests.generation.test_utils", GenerationTesterMixin=type("GenerationTesterMixin", (), {}))
    _stand_in("tests.utils.test_configuration_utils", config_common_kwargs=COMMON_FIELDS)


def _stand_in(name: str, **contents) -> None:
    """A module with these `contents`, unless the source tree has the real one."""
    folder = name.rpartition(".")[0]
    if importlib.util.find_spec(folder) is not None and importlib.util.find_spec(name) is not None:
        return
    parent = types.ModuleType(folder)
    parent.__path__ = []
    module = types.ModuleType(name)
    vars(module).update(contents)
    sys.modules.setdefault(folder, parent)
    sys.modules[name] = module
