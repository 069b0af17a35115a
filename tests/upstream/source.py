"""The tests that transformers and PEFT ship with their source distributions, as package `tests`.

A source distribution holds `tests/*.py` and none of the folders beside them. What those files import
from the folders is stood in for here where the folder is missing; a full source tree has it all, and is
then used as it is.
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


def download(library: types.ModuleType, cache: Path) -> Path:
    """The source distribution of the installed `library`, unpacked under `cache`.

    Raises:
        RuntimeError: pip cannot fetch it.
    """
    name = f"{library.__name__}-{library.__version__}"
    unpacked = cache / name
    if not unpacked.exists():
        cache.mkdir(parents=True, exist_ok=True)
        requirement = f"{library.__name__}=={library.__version__}"
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:"]
        if subprocess.run([*command, "--dest", str(cache), requirement]).returncode != 0:
            raise RuntimeError(
                f"pip could not download {requirement}; pass the path of an unpacked one."
            )
        with tarfile.open(cache / f"{name}.tar.gz") as archive:
            archive.extractall(cache, filter="data")
    return unpacked


def install(library: types.ModuleType, source: Path) -> None:
    """Make `source/tests` importable as package `tests`.

    Raises:
        ValueError: `source` holds no tests of `library`, or those of another version.
    """
    probe = {"transformers": "test_modeling_common.py", "peft": "testing_common.py"}[library.__name__]
    if not (source / "tests" / probe).exists():
        raise ValueError(f"SOURCE must be a source tree of {library.__name__} (got {str(source)!r}).")
    info = source / "PKG-INFO"
    version = f"\nVersion: {library.__version__}\n"
    if info.exists() and version not in info.read_text(encoding="utf-8"):
        raise ValueError(
            f"SOURCE must be of the installed version {library.__version__} (got {str(source)!r})."
        )
    package = types.ModuleType("tests")
    package.__path__ = [str(source / "tests")]
    sys.modules["tests"] = package
    if library is transformers:
        _stand_in_for_transformers()
    elif importlib.util.find_spec("diffusers") is None:
        # imported by what all tests share, and used only for image models
        sys.modules["diffusers"] = types.ModuleType("diffusers")
        sys.modules["diffusers"].StableDiffusionPipeline = type("StableDiffusionPipeline", (), {})


def _stand_in_for_transformers() -> None:
    # The configuration tests import transformers from beside their `__init__.py`, which is not shipped.
    transformers.utils.direct_transformers_import = lambda *args, **kwargs: transformers
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
