"""CCT on a GPU in half precision: the tokens with open gates only, and nobody asks how many they are.

The plain forms are `AttentionGates.attend_all` and `FeedForwardGate.compute`. `sparse_attention.py` and
`sparse_feed_forward.py` size tensors by the number of open gates, for which the host has to wait for a
GPU. Here tensors are as large as if all gates were open, tokens are put in order on the device, and the
kernels of `open_tokens_gpu.py` read there where they end. So a whole model fits into a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..attention.flow import Attended, AttentionCall, AttentionFlow
from ..cache.gate_states import GatedStaticLayer, gated_layer
from ..core.activations import build_activation
from ..core.linear_slices import PlainLinear, is_plain, is_watched
from ..core.records import Record
from ..feed_forward.layers import DenseFeedForward
from ..parallel.ranks import ONE_RANK
from .compact_cache import spread_compact
from .open_operators import SIZES_DIVIDE_BY, are_fit, may_take_kernels, open_operators
from .static_compact_cache import StaticCompactLayer, make_static_compact

# What the kernels take.
_HEAD_DIMS = (16, 32, 64, 128)
_MOST_PARTS = 4
# activations that a kernel computes with its product; others come behind it
_ACTIVATIONS: dict[type, str] = {
    type(build_activation(name)): kernel
    for name, kernel in {
        "relu": "relu",
        "gelu": "gelu",
        "gelu_pytorch_tanh": "gelu_tanh",
        "silu": "silu",
    }.items()
}


class OpenTokens(NamedTuple):
    """The tokens `[n]` of a flattened batch that a gate lets through, among those of M gates.

    Attributes:
        order: `[M, n]` int32, for each gate all tokens, its own in front.
        rank: `[M, n + 1]` int32, how many of its own come before each token.
        patterns: `[n]` int32, each token's gates as bits.
        by_pattern: `[n]` int32, all tokens, those of the same gates side by side; empty if nobody asked.
    """

    order: Tensor
    rank: Tensor
    patterns: Tensor
    by_pattern: Tensor

    @classmethod
    def of(cls, *gates: Tensor) -> OpenTokens:
        """Of gates `[B, T]` each, zeros and ones."""
        together = torch.stack([gate.flatten() for gate in gates], dim=-1)
        return cls(*open_operators().order_tokens(together, False))

    @classmethod
    def of_parts(cls, gates: Tensor) -> OpenTokens:
        """Of gates `[B, T, M]`, with the order by patterns."""
        return cls(*open_operators().order_tokens(gates.flatten(0, 1), True))


# --- attention ------------------------------------------------------------------------------------


def attends_open_tokens(module: Any, layer: AttentionFlow, call: AttentionCall) -> bool:
    """Whether `attend_open_tokens` can compute a call of an attention layer.

    Args:
        module: its `AttentionGates`.
    """
    x = call.hidden_states
    if not may_take_kernels(module.cct_execution, x):
        return False
    if module.is_soft or layer.training or module.training:
        return False
    if call.is_paged or module.ranks is not ONE_RANK:
        return False
    if not layer.mixture.has_plain_projections or is_watched(layer.mixture):
        return False
    linears: list[Any] = [linear for linear, _ in layer.head_projections]
    if len({linear.bias is None for linear in linears if is_plain(linear)}) > 1:
        return False  # keys without a bias, as some have, would need a product of their own
    return layer.head_dim % SIZES_DIVIDE_BY == 0 and are_fit(x, linears)


def attend_open_tokens(
    module: Any, layer: AttentionFlow, call: AttentionCall, gates: Any, mix: Any, record: Record
) -> Attended:
    """`AttentionGates.attend` of the tokens with open gates: their projections, and where there are
    kernels for it attention among them. A static cache then holds open keys only; behind a dynamic one,
    which has all keys, attention is as in the plain form.

    Args:
        module: the `AttentionGates`.
        layer, call, mix, record: as for `AttentionGates.attend`.
        gates: its `AttentionGateValues`.
    """
    held = _open_keys_of(layer, call)
    is_step = all(x is None or x.shape[1] == 1 for x in (call.hidden_states, call.source))
    is_step = is_step and layer.attn_implementation == "sdpa" and _sees_alike(call.attention_mask, 1)
    attend: Callable[..., tuple[OpenTokens, Tensor, Tensor | None]] = _attend_to_all_keys
    if held is not None and held.is_initialized:
        attend = partial(_attend_step if is_step else _attend_to_spread_keys, held)
    elif _has_kernel(layer, call) and (call.place is None or held is not None):
        attend = partial(_attend_to_open_keys, held)
    tokens, context, attentions = attend(module, layer, call, gates, mix)
    if held is not None and call.place is not None:
        call.place.note_filled()
    record = module.with_use(call, gates, record)
    return Attended(module.norm_context(context), attentions, mix, record, tokens)


def _open_keys_of(layer: AttentionFlow, call: AttentionCall) -> StaticCompactLayer | None:
    """The layer of a static cache, where it holds open keys only or does so from this call on."""
    if call.place is None or call.place.own.offloading:
        return None
    held = gated_layer(call.place)
    if isinstance(held, StaticCompactLayer):
        return held
    if type(held) is not GatedStaticLayer or held.is_initialized or not _has_kernel(layer, call):
        return None
    return make_static_compact(call.place)


def _has_kernel(layer: AttentionFlow, call: AttentionCall) -> bool:
    """Whether `attend_tokens` can compute a call's attention to the keys of its own tokens."""
    source, mask, length = call.source, call.attention_mask, call.hidden_states.shape[1]
    if source is None or layer.rotate is not None:
        return False
    if layer.attn_implementation != "sdpa" or layer.head_dim not in _HEAD_DIMS:
        return False
    if mask is None:
        return not layer.is_causal or length in (1, source.shape[1])
    return _sees_alike(mask, length)


def _sees_alike(mask: Any, length: int) -> bool:
    """Whether a mask for so many queries is of what they see, the same for all heads; or None."""
    if mask is None:
        return True
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.ndim != 4:
        return False
    return mask.shape[1] == 1 and mask.shape[2] in (1, length)


class _Projected(NamedTuple):
    """The open queries `[n, heads * dh]`, and the open keys and values `[n, kv_heads * dh]`, side by
    side; and which they are. None for keys that are cached."""

    query: Tensor
    queries: OpenTokens
    key: Any
    value: Any
    key_order: Any
    key_rank: Any

    @property
    def new_keys(self) -> tuple[Tensor, Tensor, Tensor] | None:
        return None if self.key is None else (self.key, self.value, self.key_rank)


def _project_open(module: Any, layer: AttentionFlow, call: AttentionCall, gates: Any) -> _Projected:
    """What a call projects."""
    x, source, kv_gate = call.hidden_states, call.source, gates.kv
    if source is None:
        queries = OpenTokens.of(gates.query)
        (query,) = _project(layer, x, queries, slice(1), gates=(0,))
        return _Projected(query, queries, None, None, None, None)
    if call.kv_mask is not None and call.attention_mask is not None:
        kv_gate = kv_gate * call.kv_mask  # padding, which no query sees, needs no key
    if source is x:
        queries = keys = OpenTokens.of(gates.query, kv_gate)
        of_keys = 1
        query, key, value = _project(layer, x, queries, slice(3), gates=(0, 1, 1))
    else:
        queries, keys, of_keys = OpenTokens.of(gates.query), OpenTokens.of(kv_gate), 0
        (query,) = _project(layer, x, queries, slice(1), gates=(0,))
        key, value = _project(layer, source, keys, slice(1, 3), gates=(0, 0))
    # norms give float32 under autocast
    key, value = (t.to(query.dtype) for t in (module.key_norm(key), module.value_norm(value)))
    return _Projected(query, queries, key, value, keys.order[of_keys], keys.rank[of_keys])


def _position_bias(layer: AttentionFlow, call: AttentionCall, mix: Any) -> Tensor | None:
    bias = call.position_bias
    return None if bias is None else layer.mixture.position_bias(bias, mix)


def _attend_to_open_keys(
    held: StaticCompactLayer | None,
    module: Any,
    layer: AttentionFlow,
    call: AttentionCall,
    gates: Any,
    mix: Any,
) -> tuple[OpenTokens, Tensor, None]:
    """Contexts `[B, T, h, dh]` of the open queries, which attend to the call's own keys; a cache, if
    there is one, is empty and takes these."""
    x, source = call.hidden_states, call.source
    batch, length = x.shape[:2]
    query, queries, key, value, key_order, key_rank = _project_open(module, layer, call, gates)
    mask, bias = call.attention_mask, _position_bias(layer, call, mix)
    if held is not None:
        held.fill(key, value, key_rank, batch=batch, kv_heads=layer.num_kv_heads)
        # a static cache's masks and biases are of all its places, the empty ones behind these keys
        keys = length if source is None else source.shape[1]
        mask, bias = (None if each is None else each[..., :keys] for each in (mask, bias))
    context = open_operators().attend_tokens(
        query,
        key,
        value,
        queries.order[0],
        queries.rank[0],
        key_order,
        key_rank,
        mask,
        bias,
        batch,
        layer.head_dim,
        layer.scaling,
        layer.is_causal and length > 1,
    )
    return queries, context.view(batch, length, layer.num_heads, layer.head_dim), None


def _attend_step(
    held: StaticCompactLayer,
    module: Any,
    layer: AttentionFlow,
    call: AttentionCall,
    gates: Any,
    mix: Any,
) -> tuple[OpenTokens, Tensor, None]:
    """The same of one token of each sequence, which attends to the open keys of a cache, too."""
    projected = _project_open(module, layer, call, gates)
    context = held.step(
        projected.query,
        projected.queries.rank[0],
        projected.new_keys,
        call.attention_mask,
        _position_bias(layer, call, mix),
        scaling=layer.scaling,
    )
    return projected.queries, context.view(-1, 1, layer.num_heads, layer.head_dim), None


def _attend_to_spread_keys(
    held: StaticCompactLayer,
    module: Any,
    layer: AttentionFlow,
    call: AttentionCall,
    gates: Any,
    mix: Any,
) -> tuple[OpenTokens, Tensor, Tensor | None]:
    """The same of several tokens behind a cache, in the plain form of attention."""
    batch, length = call.hidden_states.shape[:2]
    projected = _project_open(module, layer, call, gates)
    if projected.new_keys is not None:
        held.fill(*projected.new_keys, batch=batch, kv_heads=layer.num_kv_heads)
    # to their tokens' places; what closed ones get means nothing
    query = projected.query.index_select(0, projected.queries.rank[0, :-1])
    query = query.view(batch, length, layer.num_heads, layer.head_dim)
    return projected.queries, *layer.attend_to(call, query, *held.spread_keys(), mix)


def _attend_to_all_keys(
    module: Any, layer: AttentionFlow, call: AttentionCall, gates: Any, mix: Any
) -> tuple[OpenTokens, Tensor, Tensor | None]:
    """Contexts `[B, T, h, dh]`, of which those of open queries mean something, and what attention gives
    beside them."""
    x, source = call.hidden_states, call.source
    key = value = None
    if source is x:
        tokens = OpenTokens.of(gates.query, gates.kv)
        parts = _project(layer, x, tokens, slice(3), gates=(0, 1, 1), at_tokens=True)
    else:
        tokens = OpenTokens.of(gates.query)
        parts = _project(layer, x, tokens, slice(1), gates=(0,), at_tokens=True)
        if source is not None:
            keys = OpenTokens.of(gates.kv)
            parts += _project(layer, source, keys, slice(1, 3), gates=(0, 0), at_tokens=True)
    query = parts[0].reshape(*x.shape[:2], layer.num_heads, layer.head_dim)
    if source is not None:
        closed = (gates.kv == 0).unsqueeze(-1)  # where nothing was written
        normed = module.key_norm(parts[1]), module.value_norm(parts[2])
        key, value = (
            torch.unflatten(each, 0, source.shape[:2]).masked_fill(closed, 0.0) for each in normed
        )
    if call.place is not None:
        layer.prepare_cache(call.place.cache)
        spread_compact(call.place)
    query, key, value = layer.with_cached(call, query, key, value)
    return tokens, *layer.attend_to(call, query, key, value, mix)


def output_of_open_tokens(layer: AttentionFlow, linear: nn.Module, attended: Attended) -> Tensor:
    """The output of a layer whose context is of open tokens: `[B, T, h, dh]`, what is closed may hold
    anything, -> `[B, T, d]`."""
    tokens, context = attended.subset, attended.context
    if not are_fit(context, [linear]):
        is_open = (tokens.patterns & 1).view(*context.shape[:2], 1, 1) > 0
        return layer.mixture.output(linear, context.masked_fill(~is_open, 0.0), attended.mix)

    def project(x: Tensor) -> Tensor:
        combined = _combine(x.flatten(0, 1), tokens.order[0], tokens, linear, parts=1)
        return torch.unflatten(combined, 0, x.shape[:2])

    return layer.mixture.output(project, context, attended.mix)  # type: ignore[arg-type]  # one matrix


def _project(
    layer: AttentionFlow,
    x: Any,
    tokens: OpenTokens,
    which: slice,
    *,
    gates: tuple[int, ...],
    at_tokens: bool = False,
) -> list[Tensor]:
    """Queries, keys or values of open tokens, `[n, heads * dh]` each: side by side in their orders, or
    at their places."""
    heads = [layer.num_heads, layer.num_kv_heads, layer.num_kv_heads]
    found = [
        _outputs(linear, first, number * layer.head_dim)
        for (linear, first), number in zip(layer.head_projections[which], heads[which], strict=True)
    ]
    projected = _project_tokens(x, tokens, found, gates=gates, at_tokens=at_tokens)
    if not at_tokens:
        return projected
    return list(projected[0].split([weight.shape[0] for weight, _ in found], dim=1))


# --- the feed-forward layer -----------------------------------------------------------------------


def computes_open_slices(
    module: Any, x: Tensor, gates: Tensor, up: Sequence[nn.Module], down: nn.Module
) -> bool:
    """Whether `open_slices` can compute a feed-forward layer.

    Args:
        module: its `FeedForwardGate`.
    """
    if not _gates_may_take(module, x) or not are_fit(x, [*up, down]):
        return False
    return _weight(down).shape[1] % (gates.shape[-1] * SIZES_DIVIDE_BY) == 0


def open_slices(
    x: Tensor,
    gates: Tensor,
    *,
    up: Sequence[nn.Module],
    activation: Callable[..., Tensor],
    down: nn.Module,
) -> Tensor:
    """`FeedForwardGate.compute` of slices with open gates: `[B, T, d]` and gates `[B, T, M]`, zeros
    and ones -> `[B, T, d]`."""
    tokens, parts = OpenTokens.of_parts(gates), gates.shape[-1]
    hidden = _hidden(x, tokens, up, activation, gates=tuple(range(parts)))
    combined = _combine(hidden, tokens.by_pattern, tokens, down, parts=parts)
    return torch.unflatten(combined, 0, x.shape[:2])


def computes_open_parts(module: Any, x: Tensor, parts: Iterable[nn.Module]) -> bool:
    """Whether `open_parts` can compute a feed-forward layer.

    Args:
        module: its `FeedForwardGate`.
        parts: its networks.
    """
    if not _gates_may_take(module, x):
        return False
    return all(
        type(part) is DenseFeedForward
        and not (part.training or is_watched(part))
        and are_fit(x, [*_up(part), part.down])
        for part in parts
    )


def open_parts(x: Tensor, gates: Tensor, networks: Sequence[tuple[nn.Module, Any, nn.Module]]) -> Tensor:
    """`GatedFeedForward` of networks `(input norm, part, output norm)`, of tokens with open gates:
    `[B, T, d]` and gates `[B, T, M]`, zeros and ones -> `[B, T, d]`."""
    tokens, output = OpenTokens.of(*gates.unbind(-1)), torch.zeros_like(x)
    for m, (input_norm, part, output_norm) in enumerate(networks):

        def activation(*hidden: Tensor, part: Any = part) -> Tensor:
            return part.activation(hidden[0]) * hidden[1]

        chosen = part.activation if part.linear is None else activation
        hidden = _hidden(input_norm(x).to(x.dtype), tokens, _up(part), chosen, gates=(m,))
        size = part.down.out_features
        of_down = [_outputs(part.down, 0, size)]
        (y,) = _project_tokens(hidden, tokens, of_down, gates=(m,), at_tokens=True)
        y = output_norm(torch.unflatten(y, 0, x.shape[:2]))
        output = output + y.masked_fill(gates[..., m : m + 1] == 0, 0.0)
    return output


def _up(part: Any) -> list[nn.Module]:
    """The matrices of a `DenseFeedForward` in front of its activation."""
    return [part.up] if part.linear is None else [part.up, part.linear]


def _hidden(
    x: Tensor,
    tokens: OpenTokens,
    up: Sequence[nn.Module],
    activation: Callable[..., Tensor],
    *,
    gates: tuple[int, ...],
) -> Tensor:
    """The hidden activation `[n, width]` of slices with gates of their own, at the tokens' places."""
    fused = _ACTIVATIONS.get(type(activation), "") if len(up) == 1 else ""
    if isinstance(activation, nn.Module) and is_watched(activation):
        fused = ""
    hidden = []
    for linear in up:
        size = _weight(linear).shape[0] // len(gates)
        found = [_outputs(linear, part * size, size) for part in range(len(gates))]
        hidden += _project_tokens(x, tokens, found, gates=gates, activation=fused, at_tokens=True)
    return hidden[0] if fused else activation(*hidden)


# --- products -------------------------------------------------------------------------------------


def _gates_may_take(module: Any, x: Tensor) -> bool:
    """The same of a feed-forward layer, by its `FeedForwardGate`."""
    if module.training or module.control.training or module.ranks is not ONE_RANK:
        return False
    return module.num_splits <= _MOST_PARTS and may_take_kernels(module.cct_execution, x)


def _weight(linear: Any) -> Tensor:
    """`[out, in]`."""
    return linear.weight.t() if isinstance(linear, Conv1D) else linear.weight


def _outputs(linear: Any, first: int, size: int) -> tuple[Tensor, Tensor | None]:
    """Weight `[size, in]` and bias `[size]` of some of the outputs of a linear layer."""
    part = slice(first, first + size)
    return _weight(linear)[part], None if linear.bias is None else linear.bias[part]


def _project_tokens(
    x: Tensor,
    tokens: OpenTokens,
    found: Sequence[tuple[Tensor, Tensor | None]],
    *,
    gates: tuple[int, ...],
    activation: str = "",
    at_tokens: bool = False,
) -> list[Tensor]:
    weights = [weight for weight, _ in found]
    biases = [bias for _, bias in found if bias is not None]
    return open_operators().project_tokens(
        x.flatten(0, -2), tokens.order, tokens.rank, weights, biases, gates, activation, at_tokens
    )


def _combine(
    x: Tensor, order: Tensor, tokens: OpenTokens, linear: PlainLinear | Any, *, parts: int
) -> Tensor:
    """`[n, in]` of parts side by side -> `[n, out]`."""
    bias = linear.bias
    return open_operators().combine_tokens(x, order, tokens.patterns, _weight(linear), bias, parts)
