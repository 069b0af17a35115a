"""What gates remember between decoding steps, kept in the KV cache beside keys and values.

A causal MAE gate averages a window of past inputs, and CCT counts the keys that were not skipped.
`GatedCacheLayer` holds such per-token states under names, and every operation that moves the keys
(beam reorder, crop, repeat, select, offload) moves them too.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer, EncoderDecoderCache


class GatedCacheLayer(DynamicLayer):
    """`DynamicLayer` with named per-token states `[B, S, ...]` beside its keys and values."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.token_states: dict[str, Tensor] = {}

    def append(self, name: str, state: Tensor) -> Tensor:
        """Append `state` `[B, T, ...]` to what `name` holds and return all of it, `[B, S, ...]`."""
        past = self.token_states.get(name)
        self.token_states[name] = state if past is None else torch.cat([past, state], dim=1)
        return self.token_states[name]

    def _apply(self, function) -> None:
        self.token_states = {name: function(state) for name, state in self.token_states.items()}

    def offload(self) -> None:
        super().offload()
        self._apply(lambda state: state.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        super().prefetch()
        if self.is_initialized:
            self._apply(lambda state: state.to(self.device, non_blocking=True))

    def reset(self) -> None:
        super().reset()
        self.token_states = {}

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        self._apply(lambda state: state.index_select(0, beam_idx.to(state.device)))

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        if tokens_to_remove != 0:
            self._apply(lambda state: state[:, : -abs(tokens_to_remove)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._apply(lambda state: state.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._apply(lambda state: state[indices, ...])


def gated_layer(past_key_values: Cache, layer_idx: int) -> GatedCacheLayer:
    """The decoder's self-attention cache layer `layer_idx`, made able to hold token states.

    Raises:
        ValueError: the cache is of a kind that cannot hold them.
    """
    cache = past_key_values
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    while len(cache.layers) <= layer_idx and cache.layer_class_to_replicate is not None:
        cache.layers.append(cache.layer_class_to_replicate())
    layer = cache.layers[layer_idx]
    if type(layer) is DynamicLayer and not layer.is_initialized:
        cache.layers[layer_idx] = layer = GatedCacheLayer()
    if not isinstance(layer, GatedCacheLayer):
        raise ValueError(
            "past_key_values must be a dynamic cache that this model filled, so that its gates find "
            f"their past in it (got layer {type(layer).__name__}). Pass a new DynamicCache, or none."
        )
    return layer
