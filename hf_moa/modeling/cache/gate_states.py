"""What gates remember between decoding steps, kept in the KV cache beside keys and values.

A causal MAE gate averages over a window of past tokens, and CCT counts the keys that were not skipped.
Both live in the cache's layers, so that every operation that moves the keys (beam reorder, crop,
repeat, select, reset) moves them too. Only offloading does not: a window is small beside the keys,
and is needed before they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer, StaticLayer

from ..core.tracing import is_traced
from .growing import AveragedEntries, GrowingEntries, GrowingKeys
from .naming import CACHE_NAME
from .place import CachePlace, is_empty, own_cache

# Inputs that a dynamic layer holds beyond the window, so that as many tokens can be cropped.
CROP_RESERVE = 128


class Window(NamedTuple):
    """What a causal gate averages, oldest first: `entries` `[B, S, d]`, zero where they are of no real
    token, and `valid` `[B, S]` bool, the real ones; None for all."""

    entries: Tensor
    valid: Tensor | None


class GatePast(NamedTuple):
    """What a causal gate finds of earlier tokens in a layer of the cache.

    Attributes:
        layer: of the cache.
        name: of the gate's state.
        size: tokens of a window, its last one included; None for all there were.
        are_held: whether the cache has the keys of the tokens already that the gate is asked for.
    """

    layer: GatedDynamicLayer | GatedStaticLayer
    name: str
    size: int | None
    are_held: bool = False

    def window(self, entries: Tensor, valid: Tensor | None) -> Window:
        """See `GatedDynamicLayer.window`."""
        return self.layer.window(self.name, entries, valid, size=self.size, are_held=self.are_held)

    def mean(self, entry: Tensor, valid: Tensor | None) -> Tensor | None:
        """See `GatedDynamicLayer.mean`."""
        return self.layer.mean(self.name, entry, valid, size=self.size)

    def once(self, of: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """What `make` makes of weights, which stay while a cache is filled. Made again of others, as of
        another adapter's."""
        kept = self.layer.kept.get(self.name)
        if kept is None or any(old is not new for old, new in zip(kept[0], of, strict=True)):
            kept = self.layer.kept[self.name] = of, make()
        return kept[1]


class _GateStates:
    """A cache layer's named gate states, the batch first; and what the gates make of their weights."""

    # no part of what an exporter sees, as in `GrowingEntries`, nor of a copy
    __slots__ = ("_kept",)

    _kept: dict[str, tuple]

    def __getstate__(self) -> dict:
        return self.__dict__

    @property
    def kept(self) -> dict[str, tuple]:
        """Of a gate, by its state's name: weights, and what was made of them."""
        try:
            return self._kept
        except AttributeError:
            self._kept = {}
            return self._kept

    def reset(self) -> None:
        super().reset()  # type: ignore[misc]  # of the cache's layer, behind this class
        self._kept = {}

    def mean(self, name: str, entry: Tensor, valid: Tensor | None, *, size: int | None) -> Tensor | None:
        """See `GatedDynamicLayer.mean`."""
        return None

    @classmethod
    def in_place_of(cls, layer: Any) -> Self:
        """A layer of this class for another that holds no keys yet."""
        gated = cls.__new__(cls)
        gated.__dict__.update({"states": {}, **layer.__dict__})
        return gated


class GatedDynamicLayer(_GateStates, DynamicLayer):
    """`DynamicLayer` with gate states that grow with it."""

    __slots__ = ("_growing",)  # see above

    _growing: dict[str, GrowingKeys]
    states: dict[str, GrowingEntries]
    record_past = False
    _window_size: int | None = None

    def activate_past_recording(self) -> None:
        """Hold all inputs from now on, so that any crop is possible. Assisted decoding asks for it."""
        self.record_past = True

    def window(
        self,
        name: str,
        entries: Tensor,
        valid: Tensor | None,
        *,
        size: int | None,
        are_held: bool = False,
    ) -> Window:
        """Append the entries of T tokens; return what windows that end at these tokens see.

        Args:
            name: of the state.
            entries: `[B, T, d]`.
            valid: `[B, T]` bool, the real tokens among them; None for all.
            size: tokens of a window, its last one included; None for all there were.
            are_held: whether the layer has these tokens' keys already. (It matters to static ones.)
        """
        self._window_size = size
        held = self._held(size)
        seen = None if size is None else size - 1 + entries.shape[1]
        if valid is None and f"{name}_valid" not in self.states:
            return Window(self._append(name, entries, held=held, seen=seen, averaged=True), None)
        if valid is None:
            valid = entries.new_ones(entries.shape[:2], dtype=torch.bool)
        elif name in self.states and f"{name}_valid" not in self.states:
            # the first that are not all real
            past = entries.new_ones(entries.shape[0], len(self.states[name]), dtype=torch.bool)
            self._append(f"{name}_valid", past)
        entries = entries.masked_fill(~valid.unsqueeze(-1), 0.0)
        return Window(
            self._append(name, entries, held=held, seen=seen, averaged=True),
            self._append(f"{name}_valid", valid, held=held, seen=seen),
        )

    def mean(self, name: str, entry: Tensor, valid: Tensor | None, *, size: int | None) -> Tensor | None:
        """`window` and its mean, `[B, 1, d]`, in a few small operations: those of a decoding step.

        Returns:
            None where there is more to do, and nothing was appended: for several tokens, or the first;
            where some are not real; in a graph.
        """
        state = self.states.get(name)
        if entry.shape[1] > 1 or valid is not None or f"{name}_valid" in self.states:
            return None
        if not isinstance(state, AveragedEntries) or torch.is_grad_enabled() or is_traced(entry):
            return None
        return state.append_one(entry, window=size, held=self._held(size))

    def _held(self, size: int | None) -> int | None:
        """Entries to hold for windows of `size`."""
        return None if size is None or self.record_past else size - 1 + CROP_RESERVE

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """`DynamicLayer.update`, without its copy of all keys and values at each step."""
        grows_in_place = not (torch.is_grad_enabled() or torch.compiler.is_compiling() or is_empty(self))
        if not grows_in_place or self.keys is None or key_states.dtype != self.keys.dtype:
            return super().update(key_states, value_states, *args, **kwargs)
        self.keys = self._grow("keys", key_states)
        self.values = self._grow("values", value_states)
        return self.keys, self.values

    def _grow(self, name: str, new: Tensor) -> Tensor:
        growing = getattr(self, "_growing", None)
        if growing is None:
            growing = self._growing = {}
        held = getattr(self, name)
        if name not in growing or growing[name].entries is not held:  # moved, cropped or chosen from
            growing[name] = GrowingKeys(held)
        return growing[name].append(new)

    def offload(self) -> None:
        super().offload()
        self._growing = {}

    def count(self, name: str, amounts: Tensor) -> Tensor:
        """Add `[B, T, n]`; return the sums over all tokens before these, `[B, n]`."""
        before = self.counted(name)
        self._append(name, amounts)
        return torch.zeros_like(amounts[:, 0]) if before is None else before

    def counted(self, name: str) -> Tensor | None:
        """The sums over all tokens, `[B, n]`; None before the first."""
        return self.states[name].entries.sum(dim=1) if name in self.states else None

    def _append(
        self,
        name: str,
        new: Tensor,
        *,
        held: int | None = None,
        seen: int | None = None,
        averaged: bool = False,
    ) -> Tensor:
        """See `GrowingEntries.append`; `averaged` is of a new state."""
        if name not in self.states:
            entries = new[:, :0]  # by their names: Dynamo makes no object of a class that it is given
            self.states[name] = AveragedEntries(entries) if averaged else GrowingEntries(entries)
        return self.states[name].append(new, held=held, seen=seen)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._apply(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._apply(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._apply(lambda x: x[indices, ...])

    def _apply(self, function: Callable[[Tensor], Tensor]) -> None:
        """Move sequences: `function` maps what has the batch in front."""
        growing = getattr(self, "_growing", None) or {}
        for name in ("keys", "values") if self.get_seq_length() else ():
            held = getattr(self, name)
            if name in growing and growing[name].entries is held:
                growing[name].apply(function)
                setattr(self, name, growing[name].entries)
            else:
                setattr(self, name, function(held))
        for state in self.states.values():
            state.apply(function)

    def reset(self) -> None:
        super().reset()
        self.states, self._growing = {}, {}

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove >= 0:
            super().crop(tokens_to_remove)  # which refuses what is no removal
            return
        length = self.get_seq_length()
        left = length - abs(tokens_to_remove)
        needed = left if self._window_size is None else min(left, self._window_size - 1)
        shortest = min(map(len, self.states.values()), default=length)
        if shortest - abs(tokens_to_remove) < needed:
            raise ValueError(
                f"tokens_to_remove must be at most {CROP_RESERVE}, the inputs that the gates hold "
                f"beyond their window (got {tokens_to_remove}). To hold all, call "
                "`activate_past_recording()` of the cache after the first forward."
            )
        self._kept = {}  # whoever starts again may have learned since
        self._crop_keys(abs(tokens_to_remove))
        for state in self.states.values():
            state.crop(abs(tokens_to_remove))

    def for_export(self) -> GatedDynamicLayer:
        """This layer as an exported step takes and gives it."""
        for state in self.states.values():
            state.leave_room()
        return self

    def _crop_keys(self, tokens_to_remove: int) -> None:
        super().crop(-tokens_to_remove)


class GatedStaticLayer(_GateStates, StaticLayer):
    """`StaticLayer` with gate states of fixed shape, changed in place: a compiled decoding step
    neither recompiles nor reallocates.

    States stand at the positions of their tokens, as keys do, and what counts is what the cache says it
    holds: setting `cumulative_length` back sets them back, too.
    """

    states: dict[str, Tensor]

    def window(
        self,
        name: str,
        entries: Tensor,
        valid: Tensor | None,
        *,
        size: int | None,
        are_held: bool = False,
    ) -> Window:
        """See `GatedDynamicLayer.window`; before the first token stand `size - 1` that are no real
        ones."""
        if valid is None:
            valid = entries.new_ones(entries.shape[:2], dtype=torch.bool)
        before = self.max_cache_len if size is None else size - 1
        start, length = self._start(entries.shape[1], are_held=are_held), entries.shape[1]
        place = start + torch.arange(-before, length, device=entries.device)
        seen = self._put(f"{name}_valid", valid, start).index_select(1, place.clamp(min=0))
        seen = seen & (place >= 0)
        found = self._put(name, entries, start).index_select(1, place.clamp(min=0))
        return Window(found.masked_fill(~seen.unsqueeze(-1), 0.0), seen)

    def count(self, name: str, amounts: Tensor) -> Tensor:
        """See `GatedDynamicLayer.count`. The state `[B, 1 + max_cache_len, n]` has the sums before each
        token."""
        length = amounts.shape[1]
        start = self._start(length, are_held=True)
        place = start + torch.arange(length + 1, device=amounts.device)
        state = self._state(name, amounts, 1 + self.max_cache_len)
        before = state.index_select(1, place[:1])
        added = amounts if length == 1 else amounts.cumsum(dim=1)
        state.index_copy_(1, place[1:], before + added)
        return before.squeeze(1)

    def counted(self, name: str) -> Tensor | None:
        """See `GatedDynamicLayer.counted`."""
        held = self.states.get(name)
        return None if held is None else held.index_select(1, self.cumulative_length.view(1)).squeeze(1)

    def _start(self, length: int, *, are_held: bool) -> Tensor | int:
        """The position of the first of some tokens, whose keys are there already or are not."""
        if not self.is_initialized:
            return 0
        return self.cumulative_length - length if are_held else self.cumulative_length

    def _put(self, name: str, new: Tensor, start: Tensor | int) -> Tensor:
        """The state `[B, max_cache_len, ...]`, with `new` `[B, T, ...]` from `start` on."""
        place = start + torch.arange(new.shape[1], device=new.device)
        return self._state(name, new, self.max_cache_len).index_copy_(1, place, new)

    def _state(self, name: str, like: Tensor, length: int) -> Tensor:
        """The state of a name, `[B, length, ...]`, zeros at first."""
        if name not in self.states:
            self.states[name] = like.new_zeros(like.shape[0], length, *like.shape[2:])
            if not torch.compiler.is_compiling():
                torch._dynamo.mark_static_address(self.states[name])
        return self.states[name]

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        states = self.states.items()
        self.states = {name: x.index_select(0, beam_idx.to(x.device)) for name, x in states}


_GATED: dict[type, type[GatedDynamicLayer | GatedStaticLayer]] = {
    DynamicLayer: GatedDynamicLayer,
    StaticLayer: GatedStaticLayer,
}


def gated_layer(place: CachePlace) -> GatedDynamicLayer | GatedStaticLayer:
    """The layer of a place in the cache, made able to hold gate states.

    Raises:
        ValueError: the cache is of a kind that cannot hold them, or was filled without them.
    """
    own = place.own
    while len(own.layers) <= place.layer_idx and own.layer_class_to_replicate is not None:
        own.layers.append(own.layer_class_to_replicate())
    layer: Any = own.layers[place.layer_idx]
    if torch.compiler.is_exporting() and type(layer) is StaticLayer and layer.is_initialized:
        raise ValueError(
            f"{CACHE_NAME} must hold what gates remember, which transformers' wrappers for ExecuTorch "
            "do not keep (got one of keys and values). Export generation with "
            "transformers.exporters' `export_for_generation` instead."
        )
    if type(layer) in _GATED and is_empty(layer):
        layer = _GATED[type(layer)].in_place_of(layer)
        place.replace(layer)
    if not isinstance(layer, (GatedDynamicLayer, GatedStaticLayer)):
        raise ValueError(
            f"{CACHE_NAME} must be a dynamic or static cache that this model filled, so that its "
            f"gates find their past in it (got layer {type(layer).__name__}). Pass a new "
            "DynamicCache or StaticCache, or none."
        )
    return layer


def _register_with_exporters() -> None:
    """Let an exported step take caches as an exported step before it gives them: with all keys, and
    without room for more."""
    try:
        from transformers.exporters.utils import register_export_input_preparer
    except ImportError:
        return

    # named twice: what names it once may be another's, and would be replaced
    @register_export_input_preparer(CACHE_NAME, CACHE_NAME)
    def prepare_layers(model: nn.Module, inputs: dict) -> None:
        for is_cross in (False, True):
            cache = own_cache(inputs[CACHE_NAME], is_cross=is_cross)
            for layer_idx, layer in enumerate(getattr(cache, "layers", [])):
                if hasattr(layer, "for_export"):
                    cache.layers[layer_idx] = layer.for_export()


_register_with_exporters()
