"""A cache layer that holds the keys and values of the tokens that CCT does not skip, and no others.

Its memory falls with the budget. `skipped_keys.py` says how attention to them is that to all.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from .gate_cache import GatedDynamicLayer, gated_layer, own_cache
from .skipped_keys import OpenKeys
from .token_rows import TokenRows


class OpenKeysLayer(GatedDynamicLayer):
    """`keys` and `values` as in `OpenKeys`, of each sequence's tokens whose keys are not skipped.

    Attributes:
        positions: `[B, 1 + K]` int64, as in `OpenKeys`; None before the first token.
        length: tokens, skipped ones included.
    """

    positions: Tensor | None = None
    length = 0

    @property
    def open_keys(self) -> OpenKeys:
        return OpenKeys(self.keys, self.values, self.positions, self.length)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise NotImplementedError("its shape is not that of the first keys: see update")

    def update(
        self, key_states: Tensor, value_states: Tensor, *, rows: TokenRows
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values `[1, n, kv_heads, dh]`, of `rows` of the next tokens; return all,
        `[B, kv_heads, 1 + K, dh]`."""
        if self.is_initialized:
            self._open_up(torch.promote_types(self.keys.dtype, key_states.dtype))
            if len(rows):
                self._add(key_states, value_states, rows)
            elif torch.is_grad_enabled():
                self._growing = {}  # a graph may hold what is handed out
        else:
            self.dtype, self.device = key_states.dtype, key_states.device
            self.keys, self.values, self.positions, _ = OpenKeys.of(rows, key_states, value_states)
            self.is_initialized = True
        self.length += rows.chosen.shape[1]
        return self.keys, self.values

    def _open_up(self, dtype: torch.dtype) -> None:
        """Make what is held take keys of this dtype, and gradients outside of inference mode."""
        is_closed = self.keys.is_inference() and not torch.is_inference_mode_enabled()
        for name in ("keys", "values"):
            setattr(self, name, getattr(self, name).to(dtype, copy=is_closed))
        if is_closed:
            self.positions = self.positions.clone()

    def _add(self, key: Tensor, value: Tensor, rows: TokenRows) -> None:
        position = rows.positions + self.length
        if rows.is_one_sequence and self._ends_with_a_key():
            for name, new in (("keys", key), ("values", value)):
                setattr(self, name, self._grow(name, new.transpose(1, 2).to(self.keys.dtype)))
            self.positions = torch.cat([self.positions, position.unsqueeze(0)], dim=1)
            return
        batch, rank = rows.places
        slots = self.open_keys.is_key.sum(dim=1)[batch] + 1 + rank
        more = max(0, int(slots.max()) + 1 - self.positions.shape[1])
        room = self.keys.new_zeros(*self.keys.shape[:2], more, self.keys.shape[3])
        for name, new in (("keys", key), ("values", value)):
            held = self._grow(name, room)
            # where earlier ones have no key: it makes no difference to whom holds them
            held[batch, :, slots] = new.squeeze(0).to(held.dtype)
            setattr(self, name, held)
        self.positions = nn.functional.pad(self.positions, (0, more), value=-1)
        self.positions[batch, slots] = position

    def _ends_with_a_key(self) -> bool:
        """Whether the one sequence has no empty slot behind its keys, as it has if none was open yet or
        if it was chosen from several."""
        return self.positions.shape[1] == 1 or int(self.positions[0, -1]) >= 0

    def spread(self) -> GatedDynamicLayer:
        """The same as a layer of all tokens: keys and values of skipped ones are zero."""
        layer = GatedDynamicLayer.__new__(GatedDynamicLayer)
        own = ("positions", "length")
        layer.__dict__.update({k: v for k, v in self.__dict__.items() if k not in own})
        if self.is_initialized:
            batch, slots = self.open_keys.is_key.nonzero(as_tuple=True)
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
        self.positions, self.length = None, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        if self.is_initialized:
            self.positions = self.positions.index_select(0, beam_idx.to(self.positions.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        if self.is_initialized:
            self.positions = self.positions.repeat_interleave(repeats, dim=0)

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        if self.is_initialized:
            self.positions = self.positions[indices, ...]

    def _crop_keys(self, tokens_to_remove: int) -> None:
        if not self.is_initialized:
            return
        self.length = max(0, self.length - tokens_to_remove)
        # positions rise along a sequence: what stays comes first
        stays = self.positions < self.length
        positions = self.positions.masked_fill(~stays, -1)
        size = 1 + int((positions >= 0).sum(dim=1).max())
        self.keys, self.values = self.keys[:, :, :size], self.values[:, :, :size]
        self.positions = positions[:, :size]


def open_keys_layer(
    past_key_values: Cache, layer_idx: int, *, cross: bool, start: bool
) -> OpenKeysLayer | None:
    """A layer of the decoder's cache that holds open keys alone; None for one that does not.

    Args:
        past_key_values: the cache.
        layer_idx: of the layer.
        cross: its cross-attention layer, instead of the self-attention one.
        start: whether a layer that holds nothing yet becomes such a one, if it can: static and offloaded
            ones cannot.
    """
    cache = own_cache(past_key_values, cross=cross)
    layer = gated_layer(past_key_values, layer_idx, cross=cross)
    can = type(layer) is GatedDynamicLayer and not layer.is_initialized and not cache.offloading
    if can and start:
        cache.layers[layer_idx] = layer = OpenKeysLayer.in_place_of(layer)
    return layer if isinstance(layer, OpenKeysLayer) else None


def spread_open_keys(past_key_values: Cache, layer_idx: int, *, cross: bool) -> None:
    """Make a layer hold all keys, for attention that needs them."""
    cache = own_cache(past_key_values, cross=cross)
    if layer_idx < len(cache.layers) and isinstance(cache.layers[layer_idx], OpenKeysLayer):
        cache.layers[layer_idx] = cache.layers[layer_idx].spread()
