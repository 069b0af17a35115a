"""Entries of a cache that grow token by token: keys, values, and what gates remember."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..core.precision import at_least_float32

# Entries that a new buffer has room for, at least: an eighth of those it holds, if that is more.
_LEAST_ROOM = 8
# Steps after which a mean is taken of its entries again, as it always is in a short window: rounding
# errors add up until then, and weigh more there.
_STEPS_OF_A_MEAN = 64
_SHORT_WINDOW = 16


class GrowingEntries:
    """Entries `[B, S, ...]` that grow along dim 1, in a buffer with room for more: one copy of all
    entries at each decoding step would take longer than what is computed from them.

    Args:
        entries: the first ones.

    Attributes:
        entries: all there are.
    """

    # Slots are no part of what an exporter sees: there a step of generation takes and gives only the
    # entries, of any number.
    __slots__ = ("__dict__", "_buffer", "_end")

    entries: Tensor
    _buffer: Tensor | None
    _end: int

    dim = 1

    def __init__(self, entries: Tensor):
        self._take(entries)

    def __len__(self) -> int:
        return self.entries.shape[self.dim]

    def append(self, new: Tensor, *, held: int | None = None, seen: int | None = None) -> Tensor:
        """Append `new`; return the last `seen` (None: all) entries, and keep the last `held`."""
        if torch.compiler.is_compiling():
            entries = torch.cat([self.entries, new], dim=self.dim)
        elif torch.is_grad_enabled():  # what a graph holds must not change
            entries = torch.cat([self.entries, new], dim=self.dim) if len(self) else new
        else:
            return self._append_in_place(new, held, seen)
        self._take(last_entries(entries, held))  # not by `len`, which would fix the length in an export
        return last_entries(entries, seen)

    def crop(self, length: int) -> None:
        """Drop the last `length` entries, or all, where they are fewer."""
        length = min(length, len(self))
        self.entries = self.entries.narrow(self.dim, 0, len(self) - length)
        if self._room() is not None:
            self._end -= length

    def leave_room(self) -> None:
        """Hold nothing but the entries."""
        self._take(self.entries.contiguous())

    def apply(self, function: Callable[[Tensor], Tensor]) -> None:
        """Move sequences: `function` maps what has the batch in front."""
        room = self._room()
        if room is None or torch.is_grad_enabled() or torch.compiler.is_compiling():
            self._take(function(self.entries))
            return
        # with its room: the next entry needs no other copy
        start, length = self._end - len(self), len(self)
        self._buffer = function(room)
        self.entries = self._buffer.narrow(self.dim, start, length)

    def _append_in_place(self, new: Tensor, held: int | None, seen: int | None) -> Tensor:
        dim, more = self.dim, new.shape[self.dim]
        total = len(self) + more
        room = self._room()
        if room is None or self._end + more > room.shape[dim]:
            shape = list(self.entries.shape)
            shape[dim] = total + max(_LEAST_ROOM, total // 8)
            room = self.entries.new_empty(shape)
            torch.cat([self.entries, new], dim=dim, out=room.narrow(dim, 0, total))
            self._buffer, self._end = room, total
        else:
            room.narrow(dim, self._end, more).copy_(new)
            self._end += more
        held, seen = (total if size is None else min(size, total) for size in (held, seen))
        self.entries = room.narrow(dim, self._end - held, held)
        return self.entries if seen == held else room.narrow(dim, self._end - seen, seen)

    def _room(self) -> Tensor | None:
        """The buffer that the entries stand in; None without one, or if it was made in inference mode
        and this is outside of it."""
        buffer = getattr(self, "_buffer", None)  # not set by an exporter
        if buffer is not None and buffer.is_inference() and not torch.is_inference_mode_enabled():
            return None
        return buffer

    def _take(self, entries: Tensor) -> None:
        self.entries, self._buffer, self._end = entries, None, 0


class GrowingKeys(GrowingEntries):
    """Keys or values, `[B, heads, S, dh]`, that grow along dim 2."""

    __slots__ = ()

    dim = 2


class AveragedEntries(GrowingEntries):
    """Entries whose last ones are averaged: at each step one enters the mean and one leaves it."""

    # no part of what an exporter sees, as in `GrowingEntries`
    __slots__ = ("_mean", "_steps")

    _mean: Tensor | None
    _steps: int

    def append_one(self, new: Tensor, *, window: int | None, held: int | None) -> Tensor:
        """Append one entry `[B, 1, d]`; return the mean of the last `window` (None: all), in float32 at
        least. Keep the last `held` (None: all), one more than the window at least."""
        mean = getattr(self, "_mean", None)
        entries = self.append(new, held=held, seen=held)
        length = entries.shape[1]
        is_short = window is not None and window <= _SHORT_WINDOW
        if mean is None or is_short or self._steps == _STEPS_OF_A_MEAN:
            mean = at_least_float32(last_entries(entries, window)).mean(dim=1, keepdim=True)
            self._steps = 0
        elif window is None or length <= window:
            mean = mean.lerp(new.to(mean.dtype), 1 / length)
        else:
            left = entries.narrow(1, length - window - 1, 1).to(mean.dtype)
            mean = mean.add(new.to(mean.dtype) - left, alpha=1 / window)
        self._mean = mean
        self._steps += 1
        return mean

    def append(self, new: Tensor, *, held: int | None = None, seen: int | None = None) -> Tensor:
        self._mean = None
        return super().append(new, held=held, seen=seen)

    def crop(self, length: int) -> None:
        self._mean = None
        super().crop(length)

    def apply(self, function: Callable[[Tensor], Tensor]) -> None:
        mean = getattr(self, "_mean", None)
        super().apply(function)
        self._mean = None if mean is None else function(mean)


def last_entries(x: Tensor, length: int | None) -> Tensor:
    """The last `length` entries along dim 1 (all there are, where they are fewer)."""
    return x if length is None else x[:, max(0, x.shape[1] - length) :]
