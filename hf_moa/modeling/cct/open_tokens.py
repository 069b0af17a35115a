"""CCT on a GPU in half precision: the tokens with open gates only, and nobody asks how many they are.

The plain forms are `AttentionGates.attend_all` and `FeedForwardGate.compute`. `sparse_attention.py` and
`sparse_feed_forward.py` size tensors by the number of open gates, for which the host has to wait for a
GPU. Here tensors are as large as if all gates were open, tokens are put in order on the device, and the
kernels of `open_tokens_gpu.py` read there where they end. So a whole model fits into a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D
from transformers.utils.import_utils import is_torchdynamo_exporting

from ..attention.flow import Attended, AttentionCall, AttentionFlow
from ..core.activations import build_activation
from ..core.linear_slices import PlainLinear, is_plain, is_watched
from ..core.operators import kernels_run_on
from ..core.precision import compute_dtype
from ..core.records import Record
from ..core.tracing import is_transformed
from ..parallel.ranks import ONE_RANK
from .open_operators import open_operators

# What the kernels take.
_HEAD_DIMS = (16, 32, 64, 128)
_MOST_PARTS = 4
_WIDTHS_DIVIDE_BY = 16
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
    def of(cls, *gates: Tensor, sort: bool = False) -> OpenTokens:
        """Of gates `[B, T]` each, zeros and ones."""
        together = torch.stack([gate.flatten() for gate in gates], dim=-1)
        return cls(*open_operators().order_tokens(together, sort))

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
    x, mask = call.hidden_states, call.attention_mask
    if not _may_take(module.cct_execution, x) or module.is_soft or layer.training or module.training:
        return False
    if call.place is not None or call.is_paged or call.source is None or layer.rotate is not None:
        return False
    if layer.attn_implementation != "sdpa" or module.ranks is not ONE_RANK:
        return False
    if not layer.mixture.has_plain_projections or is_watched(layer.mixture):
        return False
    shape = mask.shape[1:] if isinstance(mask, Tensor) and mask.ndim == 4 else None
    length, keys = x.shape[1], call.source.shape[1]
    if mask is not None and (mask.dtype != torch.bool or shape not in ((1, length, keys), (1, 1, keys))):
        return False
    if mask is None and layer.is_causal and length not in (1, keys):
        return False
    sizes = x.shape[-1], call.source.shape[-1]
    linears: list[Any] = [linear for linear, _ in layer.head_projections]
    if len({linear.bias is None for linear in linears if is_plain(linear)}) > 1:
        return False  # keys without a bias, as some have, would need a product of their own
    return layer.head_dim in _HEAD_DIMS and _are_fit(x, linears, *sizes)


def attend_open_tokens(
    module: Any, layer: AttentionFlow, call: AttentionCall, gates: Any, mix: Any, record: Record
) -> Attended:
    """`AttentionGates.attend` of the tokens with open gates.

    Args:
        module: the `AttentionGates`.
        layer, call, mix, record: as for `AttentionGates.attend`.
        gates: its `AttentionGateValues`.
    """
    x, source = call.hidden_states, call.source
    # padding that no query sees needs no key
    kv_gate = gates.kv if call.kv_mask is None else gates.kv * call.kv_mask
    if source is x:
        queries = keys = OpenTokens.of(gates.query, kv_gate)
        of_keys = 1
        query, key, value = _project(layer, x, queries, slice(3), gates=(0, 1, 1))
    else:
        queries, keys, of_keys = OpenTokens.of(gates.query), OpenTokens.of(kv_gate), 0
        (query,) = _project(layer, x, queries, slice(1), gates=(0,))
        key, value = _project(layer, source, keys, slice(1, 3), gates=(0, 0))
    bias = call.position_bias
    context = open_operators().attend_tokens(
        query,
        module.key_norm(key),
        module.value_norm(value),
        queries.order[0],
        queries.rank[0],
        keys.order[of_keys],
        keys.rank[of_keys],
        call.attention_mask,
        None if bias is None else layer.mixture.position_bias(bias, mix),
        x.shape[0],
        layer.head_dim,
        layer.scaling,
        layer.is_causal and x.shape[1] > 1,
    )
    context = context.view(*x.shape[:2], layer.num_heads, layer.head_dim)
    record = module.with_use(call, gates, record)
    return Attended(module.norm_context(context), None, mix, record, queries)


def output_of_open_tokens(layer: AttentionFlow, linear: nn.Module, attended: Attended) -> Tensor:
    """The output of a layer whose context is of open tokens: `[B, T, h, dh]`, what is closed may hold
    anything, -> `[B, T, d]`."""
    tokens, context = attended.subset, attended.context
    if not _are_fit(context, [linear]):
        is_open = (tokens.patterns & 1).view(*context.shape[:2], 1, 1) > 0
        return layer.mixture.output(linear, context.masked_fill(~is_open, 0.0), attended.mix)

    def project(x: Tensor) -> Tensor:
        combined = _combine(x.flatten(0, 1), tokens.order[0], tokens, linear, parts=1)
        return torch.unflatten(combined, 0, x.shape[:2])

    return layer.mixture.output(project, context, attended.mix)  # type: ignore[arg-type]  # one matrix


def _project(
    layer: AttentionFlow, x: Any, tokens: OpenTokens, which: slice, *, gates: tuple[int, ...]
) -> list[Tensor]:
    """Queries, keys or values of open tokens, side by side in their orders."""
    heads = [layer.num_heads, layer.num_kv_heads, layer.num_kv_heads]
    found = [
        _outputs(linear, first, number * layer.head_dim)
        for (linear, first), number in zip(layer.head_projections[which], heads[which], strict=True)
    ]
    return _project_tokens(x, tokens, found, gates=gates)


# --- the feed-forward layer -----------------------------------------------------------------------


def computes_open_slices(
    module: Any, x: Tensor, gates: Tensor, up: Sequence[nn.Module], down: nn.Module
) -> bool:
    """Whether `open_slices` can compute a feed-forward layer.

    Args:
        module: its `FeedForwardGate`.
    """
    if not _may_take(module.cct_execution, x) or module.training or module.control.training:
        return False
    if module.ranks is not ONE_RANK or gates.shape[-1] > _MOST_PARTS or not _are_fit(x, [*up, down]):
        return False
    width = _weight(down).shape[1]
    return width % (gates.shape[-1] * _WIDTHS_DIVIDE_BY) == 0


def open_slices(
    x: Tensor,
    gates: Tensor,
    *,
    up: Sequence[nn.Module],
    activation: Callable[..., Tensor],
    down: nn.Module,
) -> Tensor:
    """`FeedForwardGate.compute` of the slices with open gates: `[B, T, d]` and gates `[B, T, M]`, zeros
    and ones -> `[B, T, d]`."""
    tokens, parts = OpenTokens.of_parts(gates), gates.shape[-1]
    fused = _ACTIVATIONS.get(type(activation), "") if len(up) == 1 else ""
    if isinstance(activation, nn.Module) and is_watched(activation):
        fused = ""
    hidden = []
    for linear in up:
        size = _weight(linear).shape[0] // parts
        found = [_outputs(linear, part * size, size) for part in range(parts)]
        every = tuple(range(parts))
        hidden += _project_tokens(x, tokens, found, gates=every, activation=fused, at_tokens=True)
    result = hidden[0] if fused else activation(*hidden)
    combined = _combine(result, tokens.by_pattern, tokens, down, parts=parts)
    return torch.unflatten(combined, 0, x.shape[:2])


# --- products -------------------------------------------------------------------------------------


def _may_take(execution: str, x: Tensor) -> bool:
    """Whether the kernels may be asked at all: only where the configuration says so."""
    return (
        execution == "sparse"
        and x.is_cuda
        and x.dtype in (torch.float16, torch.bfloat16)
        and not torch.is_grad_enabled()  # they have no derivative
        and not (is_torchdynamo_exporting() or torch.jit.is_tracing() or is_transformed(x))
        and kernels_run_on(x.device)
    )


def _are_fit(x: Tensor, linears: Sequence[Any], *sizes: int) -> bool:
    """Whether linear layers are nothing but a weight of the dtype of `x`, in sizes that tiles divide."""
    if not all(map(is_plain, linears)):
        return False
    weights = [linear.weight for linear in linears]
    sizes = (*sizes, *(size for weight in weights for size in weight.shape))
    are_of_dtype = all(weight.dtype == compute_dtype(weight) == x.dtype for weight in weights)
    return are_of_dtype and all(size % _WIDTHS_DIVIDE_BY == 0 for size in sizes)


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
        x.flatten(0, 1), tokens.order, tokens.rank, weights, biases, gates, activation, at_tokens
    )


def _combine(
    x: Tensor, order: Tensor, tokens: OpenTokens, linear: PlainLinear | Any, *, parts: int
) -> Tensor:
    """`[n, in]` of parts side by side -> `[n, out]`."""
    bias = linear.bias
    return open_operators().combine_tokens(x, order, tokens.patterns, _weight(linear), bias, parts)
