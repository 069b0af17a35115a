"""Several processes on a machine without an accelerator, which Accelerate lets train each by itself."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from transformers.utils import logging

logger = logging.get_logger(__name__)

# set by launchers of several processes, such as torchrun and mpirun
_SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")


def train_together_on_cpu() -> bool:
    """Whether this is one of several processes and there is no accelerator: `use_cpu` must then be true,
    or each would train by itself. (DeepSpeed joins them in its own way.)"""
    is_deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() in ("true", "1")
    has_accelerator = torch.accelerator.is_available()
    return _num_processes(os.environ) > 1 and not (is_deepspeed or has_accelerator)


def warn_of_single_process() -> None:
    """Say so where `accelerate launch` was asked for several processes and started one, as it does on a
    CPU."""
    environment = os.environ
    is_of_accelerate = "ACCELERATE_DYNAMO_BACKEND" in environment
    if is_of_accelerate and "MASTER_ADDR" in environment and not _num_processes(environment):
        logger.warning_once(
            "`accelerate launch` was asked for several processes and started one: a CPU has "
            "several only with --multi_gpu, which then means data parallel. Add it, or start the "
            "script with torchrun --nproc_per_node."
        )


def _num_processes(environment: Mapping[str, str]) -> int:
    """How many belong together; 0 where nothing says so."""
    return max(int(environment.get(name, "0")) for name in _SIZES)
