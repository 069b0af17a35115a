"""The compact cache: it holds the keys and values of the tokens that CCT does not skip, and no others.

Its memory falls with the budget. `skipped_keys.py` says how attention to them is that to all.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..cache.gate_states import GatedDynamicLayer
from ..cache.place import CachePlace
from .execution import LARGEST_SHARE
from .skipped_keys import KeptKeys
from .static_compact_cache import StaticCompactLayer
from .token_subset import TokenSubset

# Numbers that a layer's keys are together, from which on it pays to leave skipped ones out: attention to
# the others takes a dozen small operators more.
_LEAST_NUMBERS = 1_000_000
_LOOK_EVERY = 16  # tokens
# Multiply-accumulates of a token, from which on the same pays for one sequence at any length.
_LEAST_COST = 500_000
# Tokens that are appended in slots of their own before empty slots are closed up: an eighth of all,
# where that is more.
_LEAST_TO_CLOSE_UP = 8


class CompactLayer(GatedDynamicLayer):
    """`keys` and `values` as in `KeptKeys`, of each sequence's tokens whose keys are not skipped.

    A step's tokens take one slot in all sequences, empty in those that skip theirs: to find each its
    own would take longer than what is skipped. Every few steps empty slots are closed up.

    Attributes:
        positions: `[B, 1 + K]` int64, as in `KeptKeys`; None before the first token.
        length: tokens, skipped ones included.
    """

    keys: Tensor
    values: Tensor
    # None before the first token, when nothing asks for it
    positions: Tensor = None  # type: ignore[assignment]
    length = 0
    _since_closed_up = 0

    @classmethod
    def in_place_of(cls, layer: GatedDynamicLayer) -> CompactLayer:
        """A layer of this class for one of all keys, whose skipped ones are dropped."""
        opened = super().in_place_of(layer)
        if layer.is_initialized and layer.keys is not None and layer.values is not None:
            # what is padding counts as neither, and a mask tells of it
            used, full = layer.states["keys"].entries.unbind(dim=-1)
            subset = TokenSubset((used > 0) | (full == 0))
            keys, values = (subset.gather(x.transpose(1, 2)) for x in (layer.keys, layer.values))
            opened.keys, opened.values, opened.positions, opened.length = KeptKeys.of(
                subset, keys, values
            )
        return opened

    @property
    def kept_keys(self) -> KeptKeys:
        return KeptKeys(self.keys, self.values, self.positions, self.length)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise NotImplementedError("its shape is not that of the first keys: see update")

    def update(
        self, key_states: Tensor, value_states: Tensor, *, subset: TokenSubset
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values `[1, n, kv_heads, dh]`, of some of the next tokens; return all,
        `[B, kv_heads, 1 + K, dh]`."""
        if not self.is_initialized:
            self.dtype, self.device = key_states.dtype, key_states.device
            self.keys, self.values, self.positions, _ = KeptKeys.of(subset, key_states, value_states)
            self.is_initialized = True
        elif not len(subset):
            self._add_nothing()
        elif subset.chosen.shape[1] == 1:
            key, value = (subset.scatter(x).transpose(1, 2) for x in (key_states, value_states))
            return self.append_step(key, value, subset.chosen)
        else:
            self._add(key_states, value_states, subset)
        self.length += subset.chosen.shape[1]
        return self.keys, self.values

    def append_step(self, key: Tensor, value: Tensor, is_open: Tensor) -> tuple[Tensor, Tensor]:
        """`update` by one token of each sequence, once there are some.

        Args:
            key, value: `[B, kv_heads, 1, dh]`, anything where a token is skipped.
            is_open: `[B, 1]` bool.
        """
        if bool(is_open.any()):
            self._open_up(torch.promote_types(self.keys.dtype, key.dtype))
            self.keys = self._grow("keys", key.to(self.keys.dtype))
            self.values = self._grow("values", value.to(self.values.dtype))
            position = torch.where(is_open, self.length, -1)
            self.positions = torch.cat([self.positions, position], dim=1)
            self._since_closed_up += 1
            if self._since_closed_up >= max(_LEAST_TO_CLOSE_UP, self.positions.shape[1] // 8):
                self._close_up(if_smaller=True)
        else:
            self._add_nothing()
        self.length += 1
        return self.keys, self.values

    def _add_nothing(self) -> None:
        self._open_up(self.keys.dtype)
        if torch.is_grad_enabled():
            self._growing = {}  # a graph may hold what is handed out

    def _open_up(self, dtype: torch.dtype) -> None:
        """Make what is held take keys of this dtype, and gradients outside of inference mode."""
        is_closed = self.keys.is_inference() and not torch.is_inference_mode_enabled()
        for name in ("keys", "values"):
            setattr(self, name, getattr(self, name).to(dtype, copy=is_closed))
        if is_closed:
            self.positions = self.positions.clone()

    def _add(self, key: Tensor, value: Tensor, subset: TokenSubset) -> None:
        """Each sequence's behind its last key."""
        self._open_up(torch.promote_types(self.keys.dtype, key.dtype))
        self._close_up()
        batch, rank = subset.places
        slots = self.kept_keys.is_key.sum(dim=1)[batch] + 1 + rank
        more = max(0, int(slots.max()) + 1 - self.positions.shape[1])
        room = self.keys.new_zeros(*self.keys.shape[:2], more, self.keys.shape[3])
        for name, new in (("keys", key), ("values", value)):
            held = self._grow(name, room)
            # where earlier ones have no key: it makes no difference to whom holds them
            held[batch, :, slots] = new.squeeze(0).to(held.dtype)
            setattr(self, name, held)
        self.positions = nn.functional.pad(self.positions, (0, more), value=-1)
        self.positions[batch, slots] = subset.positions + self.length

    def _close_up(self, *, if_smaller: bool = False) -> None:
        """Leave no empty slot before a sequence's last key; `if_smaller`: only if fewer slots do."""
        self._since_closed_up = 0
        is_taken = self.kept_keys.is_key
        is_taken[:, 0] = True
        size = int(is_taken.sum(dim=1).max())
        has_none = bool((is_taken[:, 1:] <= is_taken[:, :-1]).all())
        if has_none or (if_smaller and size == is_taken.shape[1]):
            return
        order = is_taken.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :size]
        self.positions = self.positions.gather(1, order)
        for name in ("keys", "values"):
            held = getattr(self, name)
            index = order[:, None, :, None].expand(-1, held.shape[1], -1, held.shape[3])
            setattr(self, name, held.gather(2, index))

    def spread(self) -> GatedDynamicLayer:
        """The same as a layer of all tokens: keys and values of skipped ones are zero."""
        layer = GatedDynamicLayer.__new__(GatedDynamicLayer)
        own = ("positions", "length", "_since_closed_up")
        layer.__dict__.update({k: v for k, v in self.__dict__.items() if k not in own})
        if self.is_initialized:
            batch, slots = self.kept_keys.is_key.nonzero(as_tuple=True)
            for name in ("keys", "values"):
                held = getattr(self, name)
                shape = (held.shape[0], held.shape[1], self.length, held.shape[3])
                full = held.new_zeros(shape)
                full[batch, :, self.positions[batch, slots]] = held[batch, :, slots]
                setattr(layer, name, full)
        return layer

    def for_export(self) -> GatedDynamicLayer:
        return self.spread().for_export()

    def get_seq_length(self) -> int:
        return self.length

    def reset(self) -> None:
        super().reset()
        self.positions = None  # type: ignore[assignment]  # see above
        self.length, self._since_closed_up = 0, 0

    def _apply(self, function: Callable[[Tensor], Tensor]) -> None:
        super()._apply(function)
        if self.is_initialized:
            self.positions = function(self.positions)

    def _crop_keys(self, tokens_to_remove: int) -> None:
        if not self.is_initialized:
            return
        self.length = max(0, self.length - tokens_to_remove)
        # positions rise along a sequence: what stays comes first
        positions = self.positions.masked_fill(self.positions >= self.length, -1)
        slots = torch.arange(positions.shape[1], device=positions.device)
        size = 1 + int((slots * (positions >= 0)).max())
        self.keys, self.values = self.keys[:, :, :size], self.values[:, :, :size]
        self.positions = positions[:, :size]


def compact_cache_pays(
    layer: GatedDynamicLayer, kv_gate: Tensor | None, *, size: int, token_cost: int
) -> bool:
    """Whether attention is faster to the kept keys only than to all, as measured on a CPU.

    Args:
        layer: of the cache, before this call.
        kv_gate: `[B, S]`, of the keys that this call adds; None for none.
        size: numbers of a key.
        token_cost: multiply-accumulates that a skipped token saves.
    """
    past = layer.get_seq_length()
    if past % _LOOK_EVERY or kv_gate is None or kv_gate.device.type != "cpu":
        return False
    batch_size, new = kv_gate.shape
    # of one sequence, all that a layer does for a token can be skipped
    skips_layer = batch_size == 1 and token_cost >= _LEAST_COST
    if not skips_layer and batch_size * (past + new) * size < _LEAST_NUMBERS:
        return False
    if past == 0 and new == 1:  # which does not tell what share of the next ones is skipped
        return True
    used, full = kv_gate.count_nonzero(), kv_gate.numel()
    counted = layer.counted("keys") if past else None
    if counted is not None:
        used, full = counted.sum(dim=0)
    return bool(used <= LARGEST_SHARE * full)


def make_compact(place: CachePlace) -> CompactLayer | None:
    """Make a dynamic layer of the cache hold only kept keys from now on; None for one that is
    offloaded."""
    if place.own.offloading:
        return None
    layer = CompactLayer.in_place_of(place.layer)
    place.replace(layer)
    return layer


def spread_compact(place: CachePlace) -> None:
    """Make a layer of the cache hold all keys, for attention that needs them."""
    if isinstance(place.layer, (CompactLayer, StaticCompactLayer)):
        place.replace(place.layer.spread())
