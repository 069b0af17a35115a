"""The compact cache of fixed shape: for static caches what `compact_cache.py` is for dynamic ones.

On a GPU, each layer holds the keys and values of open tokens in pages. Which pages are whose stands on
the device, so a decoding step asks the host for nothing and fits into a CUDA graph. The kernels of
`paged_keys_gpu.py` fill the pages and attend to them.
"""

from __future__ import annotations

from numbers import Real
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import StaticCache

from ..cache.gate_states import GatedStaticLayer
from ..cache.place import CachePlace
from .open_operators import open_operators

PAGE = 32  # keys


class OpenPages:
    """Pages of keys and values that layers and sequences take from.

    Attributes:
        keys, values: `[pages + 1, kv_heads, PAGE, dh]`. The last page is of keys that find none.
        positions: `[pages + 1, PAGE]` int32, the tokens that they are of.
        taken: `[1]` int32, how many pages were taken; more than there are, where keys found none.

    Args:
        num_layers: that share them.
        share: of all keys, for which there is room at the start.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    taken: Tensor

    def __init__(self, num_layers: int = 1, share: float = 1.0):
        self.num_layers, self.share = num_layers, share
        self.reset()

    def reset(self) -> None:
        """Give all pages back. Layers that held some are reset, too."""
        self.batch, self.size, self.most, self._promised = 0, 0, 0, 0  # no size: there are none yet

    def make(self, most_of_layer: int, batch: int, like: Tensor) -> None:
        """Have pages for the first layer that asks, and for the others.

        Args:
            most_of_layer: pages of a layer whose keys are all open.
            batch: B.
            like: `[B, kv_heads, *, dh]`, keys.

        Raises:
            ValueError: the layers are on several devices.
        """
        if self.size:
            if like.device != self.keys.device:
                raise ValueError(
                    "A CompactStaticCache must be of layers on one device, since they share their pages "
                    f"(got {like.device} behind {self.keys.device}): use a StaticCache."
                )
            return
        self.batch, self.most = batch, self.num_layers * most_of_layer
        least = int(self.share * self.most) + self.num_layers * batch  # each has one that is not full
        self.size = min(self.most, least)
        shape = (self.size + 1, like.shape[1], PAGE, like.shape[3])
        self.keys, self.values = like.new_empty(shape), like.new_empty(shape)
        self.positions = like.new_empty(self.size + 1, PAGE, dtype=torch.int32)
        self.taken = like.new_zeros(1, dtype=torch.int32)
        _hold_still(self.keys, self.values, self.positions, self.taken)

    def reserve(self, number: int) -> None:
        """Have room for so many pages more, or grow. It waits for the device only where the room that is
        left may be too small. A compiled step cannot: `CompactStaticCache.reserve` does it before."""
        if self.size == self.most or torch.compiler.is_compiling():
            return
        if self.keys.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        self._promised += number
        if self._promised <= self.size:
            return
        self._promised = int(self.taken) + number
        if self._promised > self.size:
            self._grow(min(self.most, max(self._promised, self.size + self.size // 4)))

    def _grow(self, size: int) -> None:
        for name in ("keys", "values", "positions"):
            held = getattr(self, name)[: self.size]
            more = held.new_empty(size + 1 - self.size, *held.shape[1:])
            setattr(self, name, torch.cat([held, more]))
        self.size = size
        _hold_still(self.keys, self.values, self.positions)


class StaticCompactLayer(GatedStaticLayer):
    """`GatedStaticLayer` of keys and values of open tokens only, in pages.

    Attributes:
        pages: what it takes pages from.
        table: `[B, pages]` int32, those of each sequence in the order of their keys; -1 for none. The
            page of the next key is there already.
        rank: `[B, 1 + S]` int32, how many open keys come before each token.
    """

    pages: OpenPages
    table: Tensor
    rank: Tensor

    @classmethod
    def of(cls, layer: Any, pages: OpenPages) -> StaticCompactLayer:
        """In the place of a static layer without keys."""
        made = cls.in_place_of(layer)
        made.pages = pages
        return made

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.batch_size = key_states.shape[0]
        number = -(-self.max_cache_len // PAGE)
        self.pages.make(self.batch_size * number, self.batch_size, key_states)
        self.table = key_states.new_full((self.batch_size, number), -1, dtype=torch.int32)
        self.rank = key_states.new_zeros(self.batch_size, 1 + self.max_cache_len, dtype=torch.int32)
        self.cumulative_length = self.cumulative_length.to(self.device)
        _hold_still(self.table, self.rank, self.cumulative_length)
        self.is_initialized = True

    @property
    def _held(self) -> tuple[Tensor, ...]:
        """What the operators take."""
        pages = self.pages
        return (
            *(pages.keys, pages.values, pages.positions, pages.taken),
            *(self.table, self.rank, self.cumulative_length),
        )

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("it takes open keys only: see fill, step and spread")

    def fill(self, key: Tensor, value: Tensor, key_rank: Tensor, *, batch: int, kv_heads: int) -> None:
        """Add T tokens of each sequence.

        Args:
            key, value: `[*, kv_heads * dh]`, of those with open keys, side by side.
            key_rank: `[B * T + 1]` int32, how many of these come before each token.

        Raises:
            ValueError: the first tokens are more than the cache takes.
        """
        length = (key_rank.shape[0] - 1) // batch
        if not self.is_initialized:
            if length > self.max_cache_len:
                raise ValueError(
                    f"max_cache_len must be at least the {length} tokens that the cache takes first "
                    f"(got {self.max_cache_len})."
                )
            states = key.new_empty(batch, kv_heads, 0, key.shape[1] // kv_heads)
            self.lazy_initialization(states, states)
        self.pages.reserve(batch * (-(-length // PAGE) + 1))
        open_operators().fill_pages(*self._held, key, value, key_rank)
        self.cumulative_length.add_(length)

    def step(
        self,
        query: Tensor,
        query_rank: Tensor,
        new: tuple[Tensor, Tensor, Tensor] | None,
        mask: Tensor | None,
        bias: Tensor | None,
        *,
        scaling: float,
    ) -> Tensor:
        """Contexts of one token of each sequence, `[B, heads * dh]`; of closed queries they are not
        written.

        Args:
            query: `[*, heads * dh]`, of open queries, side by side.
            query_rank: `[B + 1]`.
            new: keys, values and `key_rank` as in `fill`, of the same tokens, which are added; None for
                none.
            mask: `[B or 1, 1, 1, S]` bool, what they see; None for all S.
            bias: `[B or 1, heads, 1, S]`, added to the scores; None for none.
            scaling: of the scores.
        """
        if new is not None:
            self.pages.reserve(self.batch_size)
        context = open_operators().attend_pages(
            *self._held, query, query_rank, *(new or (None, None, None)), mask, bias, scaling
        )
        if new is not None:
            self.cumulative_length.add_(1)
        return context

    def spread_keys(self) -> tuple[Tensor, Tensor]:
        """Keys and values of all S tokens, `[B, kv_heads, S, dh]`: zeros of closed ones, NaN of keys
        that found no page."""
        places = torch.arange(self.max_cache_len, device=self.device)
        slots = self.rank[:, :-1].long()
        is_open = (self.rank[:, 1:] > slots) & (places < self.cumulative_length)
        page = self.table.gather(1, (slots // PAGE).clamp(max=self.table.shape[1] - 1)).long()
        is_lost = (is_open & (page >= self.pages.size))[..., None, None]
        page = page.clamp(0, self.pages.size)
        keys, values = (
            held[page, :, slots % PAGE]
            .masked_fill(~is_open[..., None, None], 0.0)
            .masked_fill(is_lost, float("nan"))
            .transpose(1, 2)
            for held in (self.pages.keys, self.pages.values)
        )
        return keys, values

    def spread(self) -> GatedStaticLayer:
        """The same as a layer of all keys."""
        layer = GatedStaticLayer.__new__(GatedStaticLayer)
        own = ("pages", "table", "rank")
        layer.__dict__.update({k: v for k, v in self.__dict__.items() if k not in own})
        if self.is_initialized:
            layer.keys, layer.values = (each.contiguous() for each in self.spread_keys())
            _hold_still(layer.keys, layer.values)
            layer.num_heads, layer.k_head_dim, layer.v_head_dim = (
                layer.keys.shape[1],
                layer.keys.shape[3],
                layer.values.shape[3],
            )
        return layer

    def reset(self) -> None:
        """Hold nothing, nor do the layers that share its pages: a cache resets them all."""
        self.is_initialized = False
        super().reset()
        self.states = {}
        self.pages.reset()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        if not self.is_initialized:
            return
        beams = beam_idx.to(self.device)
        source, self.rank = self.table.index_select(0, beams), self.rank.index_select(0, beams)
        count = self.rank.index_select(1, self.cumulative_length.view(1))
        is_used = torch.arange(self.table.shape[1], device=self.device) <= count // PAGE
        is_missing = is_used & (self.table < 0)
        if self.pages.size < self.pages.most:
            self.pages.reserve(int(is_missing.sum()))
        number = is_missing.flatten().cumsum(0, dtype=torch.int32).view(is_missing.shape)
        self.table = torch.where(is_missing, self.pages.taken + number - 1, self.table)
        self.pages.taken += number.flatten()[-1:]
        last = self.pages.size
        source = torch.where(is_used, source, last).clamp(max=last).flatten()
        to = torch.where(is_used, self.table, last).clamp(max=last).flatten()
        for held in (self.pages.keys, self.pages.values, self.pages.positions):
            held[to] = held[source]
        self.states = {name: x.index_select(0, beams) for name, x in self.states.items()}


class CompactStaticCache(StaticCache):
    """A static cache whose memory falls with CCT's budget: its layers share pages for the keys and
    values of open tokens.

    Where a model computes open tokens only (on a GPU in half precision, with `cct_execution="sparse"`),
    every static cache holds only their keys, with room for all. This one has as much room as is
    expected to be needed, and takes more when that turns out to be too little: then a CUDA graph is
    recorded again. Elsewhere it is a `StaticCache`.

    Args:
        config: of the model.
        max_cache_len: tokens.
        open_keys: share of keys that are expected to be open, in (0, 1].

    Raises:
        ValueError: `open_keys` is no such number.

    Example:

    ```python
    cache = CompactStaticCache(model.config, max_cache_len=1024, open_keys=0.5)
    model.generate(**prompt, past_key_values=cache, budget=0.5)
    ```
    """

    pages: OpenPages

    def __init__(self, config: Any, max_cache_len: int, open_keys: float = 1.0):
        if isinstance(open_keys, bool) or not isinstance(open_keys, Real) or not 0 < open_keys <= 1:
            raise ValueError(f"open_keys must be a number in (0, 1] (got {open_keys!r}).")
        super().__init__(config, max_cache_len)
        self.pages = OpenPages(len(self.layers), float(open_keys))
        self.layers = [StaticCompactLayer.of(layer, self.pages) for layer in self.layers]

    def reserve(self) -> None:
        """Have room for one token more of each sequence. `generate` calls it; call it before each
        compiled step of a loop of your own."""
        if self.pages.size:
            self.pages.reserve(len(self.layers) * self.pages.batch)


def make_static_compact(place: CachePlace) -> StaticCompactLayer:
    """Make an empty static layer of the cache hold open keys only, with room for all."""
    layer = StaticCompactLayer.of(place.layer, OpenPages())
    place.replace(layer)
    return layer


def _hold_still(*tensors: Tensor) -> None:
    """Tell compilers that these tensors are changed in place, as transformers' static layers do."""
    if not torch.compiler.is_compiling():
        for each in tensors:
            torch._dynamo.mark_static_address(each)
