"""Where half precision is too coarse: decisions, means, statistics, costs and losses."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def at_least_float32(x: Tensor) -> Tensor:
    """`x` in float32, or as it is in float64."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def autocasts(device_type: str) -> bool:
    """Whether autocast is on for a kind of device; the meta device knows none."""
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def multiplies_in_float32(x: Tensor) -> bool:
    """Whether products with `x` round as float32 does (or float64): in no half precision, not by
    autocast, and not by TF32 or bfloat16 in float32's stead."""
    if x.dtype is torch.float64:
        return True
    backend = {"cpu": torch.backends.mkldnn, "cuda": torch.backends.cuda}.get(x.device.type)
    if x.dtype is not torch.float32 or backend is None or autocasts(x.device.type):
        return False
    return backend.matmul.fp32_precision in ("none", "ieee")


def without_autocast(device_type: str) -> AbstractContextManager:
    """A context in which products keep the dtype of their inputs."""
    return torch.autocast(device_type, enabled=False) if autocasts(device_type) else nullcontext()


def compute_dtype(weight: Tensor) -> torch.dtype:
    """What a product with `weight` is computed in: its own dtype, or autocast's."""
    device = weight.device.type
    return torch.get_autocast_dtype(device) if autocasts(device) else weight.dtype
