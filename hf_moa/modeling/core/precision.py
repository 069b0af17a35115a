"""Where half precision is too coarse: decisions, means, statistics, costs and losses."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn


def at_least_float32(x: Tensor) -> Tensor:
    """`x` in float32, or as it is in float64."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def has_float64(device: torch.device) -> bool:
    """Whether a device computes in float64: Apple's GPUs and some of Intel's do not."""
    if device.type == "xpu":
        return bool(torch.xpu.get_device_capability(device).get("has_fp64", True))
    return device.type != "mps"


def in_float64(x: Tensor) -> Tensor:
    """`x` in float64; in float32 on a device that has no float64."""
    return x.double() if has_float64(x.device) else x.float()


def on_device(x: Tensor, device: torch.device) -> Tensor:
    """`x.to(device)`, of float64 in float32 where the device has no float64."""
    too_wide = x.dtype == torch.float64 and not has_float64(device)
    return (x.float() if too_wide else x).to(device)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x.to(dtype)`, whose look at a tensor that needs nothing takes as long as a small operator."""
    return x if x.dtype is dtype else x.to(dtype)


def in_dtype_of(linear: nn.Module, x: Tensor) -> Tensor:
    """`x` for a layer that may have stayed in float32 in a model of half precision, as T5's `wo` does;
    quantized layers, whose weights are no tensors or no floating-point numbers, cast by themselves."""
    weight = linear.weight
    if isinstance(weight, Tensor) and weight.is_floating_point():
        return cast(x, weight.dtype)
    return x


def autocasts(device_type: str) -> bool:
    """Whether autocast is on for a kind of device; the meta device knows none."""
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def without_autocast(device_type: str) -> AbstractContextManager:
    """A context in which products keep the dtype of their inputs."""
    return torch.autocast(device_type, enabled=False) if autocasts(device_type) else nullcontext()


def compute_dtype(weight: Tensor) -> torch.dtype:
    """What a product with `weight` is computed in: its own dtype, or autocast's."""
    device = weight.device.type
    return torch.get_autocast_dtype(device) if autocasts(device) else weight.dtype
