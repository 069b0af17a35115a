"""One run of an example script, in this process."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

Flags = dict[str, Any]

OF_NEW_MODELS = ("model_type", "vocab_size", "config_overrides", "attention_type")  # flags

# of all runs: quiet, without checkpoints, on whatever accelerator there is
TRAINER_FLAGS: Flags = {
    "save_strategy": "no",
    "log_level": "error",
    "disable_tqdm": True,
    "report_to": "none",
    "logging_steps": 100,
}


def run_script(name: str, flags: Flags, output_dir: str | Path) -> dict[str, Any]:
    """Run `examples/<name>.py` and return its `all_results.json`.

    Args:
        flags: name -> value; a list is several words, a dict such as `config_overrides` is `a=1,b=2`.
    """
    flags = {**flags, "use_cpu": not torch.cuda.is_available(), "output_dir": output_dir}
    importlib.import_module(name).main(as_argv(flags))
    return read_json(Path(output_dir, "all_results.json"))


def run_script_once(name: str, flags: Flags, folder: str | Path) -> dict[str, Any]:
    """`run_script`, unless the folder holds this run already; one that was cut off there goes on, where
    the flags say so, and one that another process makes there is waited for.

    Raises:
        ValueError: the folder holds a run of other flags.
    """
    with claimed(folder):
        _note_flags(Path(folder), flags)
        finished = Path(folder, "all_results.json")
        return read_json(finished) if finished.is_file() else run_script(name, flags, folder)


def claimed(folder: str | Path) -> FileLock:
    """Keeps other processes out of a folder, as a context: shards may need the same model."""
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(folder.with_name(f"{folder.name}.lock"))


def _note_flags(folder: Path, flags: Flags) -> None:
    """Note in the folder whose run it holds."""
    path, text = folder / "flags.json", json.dumps(flags, indent=1, default=str)
    if path.is_file() and path.read_text(encoding="utf-8") != text:
        raise ValueError(
            f"{folder} holds a run of other flags (see {path.name} there): remove it, or give another "
            "folder for the models."
        )
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def as_argv(flags: Flags) -> list[str]:
    argv = []
    for name, value in flags.items():
        if isinstance(value, dict):
            value = ",".join(f"{key}={each}" for key, each in value.items())
        values = value if isinstance(value, (list, tuple)) else [value]
        argv += [f"--{name}", *map(str, values)]
    return argv


def precision_flag(precision: str) -> Flags:
    """What `--precision` means for a script.

    Raises:
        ValueError: it is neither bf16 nor float32.
    """
    if precision not in ("bf16", "float32"):
        raise ValueError(f"--precision must be bf16 or float32 (got {precision}).")
    return {"bf16": precision == "bf16"}


def merged(flags: Flags, more: Flags) -> Flags:
    """Both; dicts of the same name, too, are put together."""
    result = {**flags, **more}
    for name in flags.keys() & more.keys():
        if isinstance(flags[name], dict):
            result[name] = {**flags[name], **more[name]}
    return result


def starting_from(checkpoint: str | Path, flags: Flags) -> Flags:
    """The flags for training a checkpoint on, where a new model was trained with these."""
    kept = {name: value for name, value in flags.items() if name not in OF_NEW_MODELS}
    return {**kept, "model_name_or_path": checkpoint}


def run_folder(parent: str | Path, variant: str, seed: int) -> Path:
    """Where a run's model is kept."""
    return Path(parent, f"{variant.replace(',', '').replace(' ', '-')}-{seed}")


def budget_argument(budget: float | None) -> dict[str, float]:
    """What a call of a model is given for a budget; without one, nothing."""
    return {} if budget is None else {"budget": budget}


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
