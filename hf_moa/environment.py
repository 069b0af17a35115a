"""What a measurement depends on besides the code."""

from __future__ import annotations

import platform
from pathlib import Path

import torch


def processor_name() -> str:
    """The GPU's name, where there is one, else the CPU's."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    cpuinfo = Path("/proc/cpuinfo")  # Linux; elsewhere the name may be an empty string
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(iter(names), platform.processor() or platform.machine())
