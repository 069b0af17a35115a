"""What the kernels in Triton share: its decorator, and whether it can run them here."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from transformers.utils import logging

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None

logger = logging.get_logger(__name__)


@cache
def runs_on(device: torch.device) -> bool:
    """Whether the kernels can run on a GPU, and its tensor cores know their dtypes: Triton builds its
    driver when it is first asked for, which takes a C compiler."""
    if triton is None:
        return False
    try:
        triton.runtime.driver.active.get_current_target()
    except Exception as error:
        logger.warning(
            f"Gates go without kernels of their own, since Triton has no driver here: {error}"
        )
        return False
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


def jit(function: Callable) -> Any:
    """Triton's decorator; without Triton, the function as it is, which nobody calls."""
    return function if triton is None else triton.jit(function)


@cache
def resident_programs(device: torch.device) -> int:
    """So many programs that take one tile after another: two for each multiprocessor."""
    if device.type != "cuda":  # they are interpreted
        return 3
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count
