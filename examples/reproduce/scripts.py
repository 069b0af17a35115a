"""One run of an example script, in this process."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import torch

Flags = dict[str, Any]

# of all runs: quiet, without checkpoints, on whatever accelerator there is
TRAINER_FLAGS: Flags = {
    "bf16": True,
    "save_strategy": "no",
    "log_level": "error",
    "disable_tqdm": True,
    "report_to": "none",
    "logging_steps": 100,
}


def run_script(name: str, flags: Flags, output_dir: str | Path) -> dict[str, Any]:
    """Run `examples/<name>.py` and return its `all_results.json`.

    Args:
        flags: name -> value; a list is several words, True of a flag without a value is written out.
    """
    flags = {**flags, "use_cpu": not torch.cuda.is_available(), "output_dir": output_dir}
    importlib.import_module(name).main(as_argv(flags))
    return read_json(Path(output_dir, "all_results.json"))


def as_argv(flags: Flags) -> list[str]:
    argv = []
    for name, value in flags.items():
        values = value if isinstance(value, (list, tuple)) else [value]
        argv += [f"--{name}", *map(str, values)]
    return argv


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
