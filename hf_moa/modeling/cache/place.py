"""The place of one attention layer in a cache."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer, EncoderDecoderCache, StaticLayer

from .naming import CACHE_NAME


class CachePlace(NamedTuple):
    """Where an attention layer keeps its keys and values, and its gates what they remember.

    Attributes:
        cache: of the call; of encoder-decoder models the cache of both attentions.
        layer_idx: of the layer.
        is_cross: of cross-attention.
    """

    cache: Cache
    layer_idx: int
    is_cross: bool

    @property
    def own(self) -> Cache:
        """The part of the cache that is of this attention: self-attention's or cross-attention's."""
        return own_cache(self.cache, is_cross=self.is_cross)

    @property
    def is_filled(self) -> bool:
        """Whether the keys of cross-attention are there."""
        return self.is_cross and bool(self._filled.get(self.layer_idx))

    @property
    def _filled(self) -> dict[int, bool]:
        """Of an encoder-decoder model's cache: the layers whose keys of cross-attention are there."""
        return self.cache.is_updated  # type: ignore[attr-defined]  # an `EncoderDecoderCache`

    @property
    def layer(self) -> Any:
        """The cache's layer; None before there is one."""
        layers = self.own.layers
        return layers[self.layer_idx] if self.layer_idx < len(layers) else None

    def replace(self, layer: Any) -> None:
        """Put another layer in its place."""
        self.own.layers[self.layer_idx] = layer

    def note_filled(self) -> None:
        """Note that the keys of cross-attention are there from now on."""
        if self.is_cross:
            self._filled[self.layer_idx] = True

    def held(self, device: Any) -> tuple[Tensor, Tensor]:
        """The keys and values that are there, `[B, kv_heads, S, dh]`, on a device: an offloaded cache
        brings back only the layers that are updated."""
        return self.layer.keys.to(device), self.layer.values.to(device)

    def update(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add keys and values `[B, kv_heads, T, dh]`; return all.

        Raises:
            ValueError: the cache's are of other heads; those of PEFT's prefix tuning are, by default.
        """
        layer = self.layer
        if layer is not None and layer.is_initialized and layer.keys.numel():
            (_, heads, _, size), (_, held_heads, _, held_size) = key.shape, layer.keys.shape
            if (heads, size) != (held_heads, held_size):
                raise ValueError(
                    f"{CACHE_NAME} must hold keys of this model's heads, {heads} of size {size} in "
                    f"layer {self.layer_idx} (got {held_heads} of size {held_size}). With nested "
                    "budgets, a cache is of one budget. A PrefixTuningConfig makes keys of these heads "
                    f"with num_attention_heads={heads}, token_dim={heads * size}."
                )
        key, value = self.own.update(key, value, self.layer_idx)
        self.note_filled()
        return key, value


def own_cache(cache: Cache, *, is_cross: bool) -> Cache:
    """The part of a decoder's cache that is of self-attention, or of cross-attention."""
    if not isinstance(cache, EncoderDecoderCache):
        return cache
    return cache.cross_attention_cache if is_cross else cache.self_attention_cache


def is_empty(layer: DynamicLayer | StaticLayer) -> bool:
    """Whether a layer holds no keys."""
    # Compiled code meets static layers that were filled eagerly, and those are gated already.
    return not layer.is_initialized or int(layer.get_seq_length()) == 0
