"""Where half precision is too coarse: decisions, means, statistics, costs and losses."""

from __future__ import annotations

import torch
from torch import Tensor


def at_least_float32(x: Tensor) -> Tensor:
    """`x` in float32, or as it is in float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
