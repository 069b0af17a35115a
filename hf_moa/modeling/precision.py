"""Where half precision is too coarse: decisions, means, statistics, costs and losses."""

from __future__ import annotations

import torch
from torch import Tensor


def at_least_float32(x: Tensor) -> Tensor:
    """`x` in float32, or as it is in float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def compute_dtype(weight: Tensor) -> torch.dtype:
    """What a product with `weight` is computed in: its own dtype, or autocast's."""
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
