"""What MAE gates see of a sequence: the mean of its inputs, or in causal layers of the last W.

Means are computed in float32 at least; in products that `torch.set_float32_matmul_precision` rules.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..cache.gate_states import Window
from ..core.precision import at_least_float32, without_autocast

# Sums at up to so many positions are products with a band of ones: faster than running sums, and no
# rounding error travels along the sequence.
_LARGEST_BAND = 256
_SMALLEST_BLOCK = 64


def masked_mean(x: Tensor, mask: Tensor | None) -> Tensor:
    """Mean of `x` `[B, T, d]` over its real tokens -> `[B, d]`; zero where there are none."""
    dtype = torch.promote_types(x.dtype, torch.float32)  # of the sum: no copy of x
    if mask is None:
        return x.mean(dim=1, dtype=dtype)
    mask = mask.unsqueeze(-1)
    return x.masked_fill(~mask, 0.0).sum(dim=1, dtype=dtype) / mask.sum(dim=1).clamp(min=1)


def windowed_mean(x: Tensor, mask: Tensor | None, window: int | None) -> Tensor:
    """Mean at each position of the real tokens among the last `window` positions up to it.

    Args:
        x: `[B, T, d]`.
        mask: `[B, T]` bool, or None.
        window: positions, the present one included; None for all.

    Returns:
        `[B, T, d]`; zero where the window holds no real token.
    """
    if mask is None:
        return _mean_of_masked(x, None, window, last=x.shape[1])
    return _mean_of_masked(x.masked_fill(~mask.unsqueeze(-1), 0.0), mask, window, last=x.shape[1])


def last_windowed_means(cached: Window, window: int | None, *, last: int) -> Tensor:
    """`windowed_mean` at the `last` positions of cached inputs -> `[B, last, d]`."""
    return _mean_of_masked(cached.entries, cached.valid, window, last=last)


def _mean_of_masked(x: Tensor, mask: Tensor | None, window: int | None, *, last: int) -> Tensor:
    """Means at the `last` positions; `x` is zero where `mask` is False."""
    x = at_least_float32(x)
    length = x.shape[1]
    window = length if window is None else min(window, length)
    if last == 1:
        if window < length:
            x = x[:, length - window :]
            mask = None if mask is None else mask[:, length - window :]
        count = window if mask is None else mask.sum(dim=1, keepdim=True).clamp(min=1).unsqueeze(-1)
        return x.sum(dim=1, keepdim=True).div_(count)
    if mask is None:
        count = torch.arange(length - last + 1, length + 1, device=x.device).clamp(max=window)
        count = count.to(x.dtype).unsqueeze(-1)
    else:
        # shape: (B, T, 1)
        count = _windowed_sum(mask.unsqueeze(-1).to(x.dtype), window, last=last).clamp(min=1)
    # Autocast would round to half precision.
    with without_autocast(x.device.type):
        if last <= _LARGEST_BAND:
            return (_band(last, length, window, x) / count) @ x
        return _windowed_sum(x, window, last=last) / count


def _windowed_sum(x: Tensor, window: int, *, last: int) -> Tensor:
    """Sums of the last `window` positions at the `last` ones: `[B, T, d]` -> `[B, last, d]`."""
    length = x.shape[1]
    if last <= _LARGEST_BAND:
        return _band(last, length, window, x) @ x
    if window > _LARGEST_BAND:
        total = x.cumsum(dim=1)
        if window < length:
            total = torch.cat([total[:, :window], total[:, window:] - total[:, :-window]], dim=1)
        return total[:, length - last :]
    # In blocks no shorter than the window, it reaches no further than into the block before.
    size = max(window, _SMALLEST_BLOCK)
    blocks = torch.unflatten(nn.functional.pad(x, (0, 0, 0, -length % size)), 1, (-1, size))
    band = _band(size, 2 * size, window, x)
    total = band[:, size:] @ blocks
    total[:, 1:] += band[:, :size] @ blocks[:, :-1]
    return total.flatten(1, 2)[:, length - last : length]


def _band(positions: int, length: int, window: int, like: Tensor) -> Tensor:
    """`[positions, length]` ones where the window that ends at a position holds another; the positions
    are the last of all."""
    end = torch.arange(length - positions, length, device=like.device).unsqueeze(-1)
    position = torch.arange(length, device=like.device)
    return ((position <= end) & (position > end - window)).to(like.dtype)
