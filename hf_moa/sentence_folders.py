"""A sentence-transformers folder, whose first module is upcycled: the other modules stay.

A `modules.json` names them: the transformer, pooling, and what follows. Without them a gated
checkpoint's embeddings are others than its source's.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from transformers import AutoConfig
from transformers.utils import cached_file

from .relatives import source_kind

MODULES = "modules.json"
# of the whole model, and of a transformer's module
_SETTINGS = ("config_sentence_transformers.json", "sentence_*config.json")


def sentence_modules(source: str | Path) -> list[dict[str, Any]] | None:
    """The modules of a folder or Hub id, in order; None where it is no sentence-transformers model.

    Raises:
        ValueError: the first module is no transformer, or a module's path leads out of the folder.
    """
    # where the Hub is out of reach, the checkpoint's own loading says so
    found = cached_file(
        str(source),
        MODULES,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if found is None:
        return None
    modules = json.loads(Path(found).read_text(encoding="utf-8"))
    first = modules[0]["type"].rsplit(".", 1)[-1] if modules else "none"
    if first != "Transformer":
        raise ValueError(f"The first module of {source} must be a Transformer (got {first}).")
    for path in (each["path"] for each in modules):
        if Path(path).is_absolute() or ".." in Path(path).parts:
            raise ValueError(f"{MODULES} of {source} must name folders in it (got {path!r}).")
    return modules


def encoder_task(source: str | Path, *, subfolder: str = "") -> str:
    """The task of a source's encoder, which sentence-transformers reads: of an encoder-decoder model
    only its first half. (What class a checkpoint was saved from does not matter.)"""
    kind = source_kind(AutoConfig.from_pretrained(source, subfolder=subfolder))
    return "text-encoding" if "text-encoding" in kind.tasks else "feature-extraction"


def write_modules(source: str | Path, modules: list[dict[str, Any]], folder: str | Path) -> None:
    """Write what a sentence-transformers model has beside its transformer, which is a gated one now.

    Args:
        source: folder or Hub id that `modules` are of.
        folder: where the gated checkpoint is, or will be, in the transformer's own path.
    """
    place, folder = Path(source), Path(folder)
    transformer, *others = modules
    if not place.is_dir():
        patterns = [*_SETTINGS, *(f"{each['path'] or '.'}/*" for each in modules)]
        place = Path(snapshot_download(str(source), allow_patterns=patterns, ignore_patterns="*.bin"))
    for each in others:
        if (place / each["path"]).is_dir() and each["path"]:
            shutil.copytree(place / each["path"], folder / each["path"], dirs_exist_ok=True)
    for inside in {"", transformer["path"]}:
        for pattern in _SETTINGS:
            for path in (place / inside).glob(pattern):
                (folder / inside).mkdir(parents=True, exist_ok=True)
                shutil.copy(path, folder / inside / path.name)
    # what `encode` hands on to the transformer
    written = [{**transformer, "kwargs": ["budget"]}, *others]
    (folder / MODULES).write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
