"""What a run ran on: versions of the packages that matter, threads, accelerator."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

PACKAGES = ("torch", "transformers", "tokenizers", "peft", "accelerate", "hf-moa")


def environment() -> dict[str, Any]:
    """Facts for a bug report or beside a measured number.

    Returns:
        `python`, one entry per package (its version, or None where it is not installed),
        `platform`, `processor`, `cpus` (usable by this process), `threads` (of torch), `accelerator`
        (such as cuda or mps; None without any) and `cuda` (names of the devices, an empty list without
        any).
    """
    import torch

    facts: dict[str, Any] = {"python": platform.python_version()}
    facts |= {name.replace("-", "_"): version_of(name) for name in PACKAGES}
    cuda = torch.cuda.is_available()
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return facts | {
        "platform": platform.platform(),
        "processor": _processor(),
        "cpus": usable_cpus(),
        "threads": torch.get_num_threads(),
        "accelerator": None if accelerator is None else accelerator.type,
        "cuda": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        if cuda
        else [],
    }


def device_name(device: torch.device) -> str:
    """What computes: a GPU by its name, or the processor and the threads that torch has of it."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return str(device)
    threads = torch.get_num_threads()
    return f"{_processor()}, {threads} thread{'s' if threads > 1 else ''}"


def version_of(package: str) -> str | None:
    """Version of a package; None where there is none.

    What was imported says it itself: torch names its build (+cu130), which its distribution may not, and
    a checkout need not be installed.
    """
    imported = getattr(sys.modules.get(package.replace("-", "_")), "__version__", None)
    if imported is not None:
        return str(imported)
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def package_versions(*, is_adapter: bool = False) -> dict[str, str]:
    """Package -> installed version, of those that a training run depends on."""
    packages = {"hf_moa": "hf-moa", **({"PEFT": "peft"} if is_adapter else {})}
    packages |= {"Transformers": "transformers", "PyTorch": "torch"}
    packages |= {"Datasets": "datasets", "Tokenizers": "tokenizers"}
    found = {name: version_of(package) for name, package in packages.items()}
    return {name: version for name, version in found.items() if version is not None}


def usable_cpus() -> int:
    """CPUs this process may run on, which in a container can be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def idle_cpus() -> int:
    """CPUs this process may run on less the work of the last minute, at least 1.

    Threads that wait for one another slow down many times over where another program holds one of
    their CPUs.
    """
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return max(1, usable_cpus() - round(load))


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
