"""The operators of `open_operators.py` on a GPU, in Triton.

Programs read on the device how many tokens there are. A grid is as large as the GPU, or as the worst
case where that is smaller, and a program takes tile after tile until the tokens end. Sums are in
float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.gpu_kernels import jit, resident_programs, tl, triton

BLOCK = 128  # tokens that a program takes at once, where it puts them in order
_CHUNK = 64  # tiles whose counts it adds up at once


# --- in order -------------------------------------------------------------------------------------


@jit
def _find_patterns(
    gates,
    patterns,
    numbers,
    num_rows,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of gates `[n, PARTS]`: the bits of each token, `patterns` `[n]`, and of each tile how many tokens
    have each place in the order of patterns, `numbers` `[tiles, 2 ** PARTS]`."""
    PATTERNS: tl.constexpr = 1 << PARTS
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    bits = _bits_of(gates, patterns, rows, num_rows, PARTS)
    number = tl.sum(_at_places(bits, rows < num_rows, PATTERNS), 0)
    tl.store(numbers + tl.program_id(0) * PATTERNS + tl.arange(0, PATTERNS), number)


@jit
def _bits_of(gates, patterns, rows, num_rows, PARTS: tl.constexpr):
    exists = rows < num_rows
    bits = tl.zeros_like(rows)
    for part in tl.static_range(PARTS):
        gate = tl.load(gates + rows.to(tl.int64) * PARTS + part, mask=exists, other=0.0)
        bits += tl.where(gate != 0, 1 << part, 0)
    tl.store(patterns + rows, bits, mask=exists)
    return bits


@jit
def _at_places(bits, exists, PATTERNS: tl.constexpr):
    """Which place in the order of patterns each token has, `[n, PATTERNS]`, zeros and ones."""
    places = tl.arange(0, PATTERNS)
    return ((_place_of(bits, PATTERNS)[:, None] == places[None, :]) & exists[:, None]).to(tl.int32)


@jit
def _place_of(bits, PATTERNS: tl.constexpr):
    """Where a pattern stands in the order: a Gray code backwards, which ends with no gate. Neighbours
    differ in one gate, so a tile with two of them computes little for nothing."""
    gray = bits ^ (bits >> 1)
    return PATTERNS - 1 - (gray ^ (gray >> 2))


@jit
def _put_in_order(
    gates,
    patterns,
    numbers,
    order,
    rank,
    by_pattern,
    num_rows,
    num_tiles,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """For each gate all tokens, those that it lets through in front, `order` `[PARTS, n]`, and how many
    of these come before each token, `rank` `[PARTS, n + 1]`; `by_pattern` `[n]`, if it is not None: all
    tokens, those of the same pattern side by side. Where all tokens are in one tile, `numbers` is None,
    and `patterns` are found here."""
    PATTERNS: tl.constexpr = 1 << PARTS
    places = tl.arange(0, PATTERNS)
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = rows < num_rows
    backwards = PATTERNS - 1 - places
    bits_of = backwards ^ (backwards >> 1)
    before = tl.zeros((PATTERNS,), dtype=tl.int32)
    number = tl.zeros((PATTERNS,), dtype=tl.int32)
    if numbers is None:
        bits = _bits_of(gates, patterns, rows, num_rows, PARTS)
        number += tl.sum(_at_places(bits, exists, PATTERNS), 0)
    else:
        for first in range(0, num_tiles, CHUNK):
            tiles = first + tl.arange(0, CHUNK)
            found = tl.load(
                numbers + tiles[:, None] * PATTERNS + places[None, :],
                mask=(tiles < num_tiles)[:, None],
                other=0,
            )
            number += tl.sum(found, 0)
            before += tl.sum(tl.where((tiles < tl.program_id(0))[:, None], found, 0), 0)
        bits = tl.load(patterns + rows, mask=exists, other=0)
    for part in tl.static_range(PARTS):
        is_open = (bits >> part) & 1
        of_part = (bits_of >> part) & 1
        place = tl.sum(before * of_part, 0) + tl.cumsum(is_open, 0) - is_open
        count = tl.sum(number * of_part, 0)
        slot = tl.where(is_open == 1, place, count + rows - place)
        tl.store(order + part * num_rows + slot, rows, mask=exists)
        tl.store(rank + part * (num_rows + 1) + rows, place, mask=exists)
        if tl.program_id(0) == 0:
            tl.store(rank + part * (num_rows + 1) + num_rows, count)
    if by_pattern is not None:
        own = _at_places(bits, exists, PATTERNS)
        first_of = tl.cumsum(number, 0) - number + before
        same_before = tl.cumsum(own, 0) - 1
        slot = tl.sum(own * (first_of[None, :] + same_before), 1)
        tl.store(by_pattern + slot, rows, mask=exists)


# --- products -------------------------------------------------------------------------------------


@jit
def _activated(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "relu":
        x = tl.maximum(x, 0.0)
    elif ACTIVATION == "gelu":
        x = 0.5 * x * (1.0 + tl.math.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        inner = 0.7978845608028654 * x * (1.0 + 0.044715 * x * x)
        x = x / (1.0 + tl.exp(-2.0 * inner))
    elif ACTIVATION == "silu":
        x = x / (1.0 + tl.exp(-x))
    return x


@jit
def _project(
    x,
    order,
    rank,
    weight,
    weight_1,
    weight_2,
    weight_3,
    bias,
    bias_1,
    bias_2,
    bias_3,
    out,
    out_1,
    out_2,
    out_3,
    num_rows,
    width_in,
    size,
    size_1,
    size_2,
    size_3,
    stride_out,
    stride_in,
    stride,
    stride_1,
    stride_2,
    stride_3,
    PARTS: tl.constexpr,
    LISTS: tl.constexpr,
    AT_TOKENS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SUMMED: tl.constexpr,
):
    """`out[i] = activation(x[order[i]] weight^T + bias)` of the tokens that a part's gate lets through,
    up to four parts. Parts share `x` `[n, width_in]`; each has a matrix `[size, width_in]`, of strides
    that all share, and rows of its own stride. LISTS: four bits for each part, its gate. AT_TOKENS: rows
    lie at their tokens' places, not side by side. Programs: any, times parts."""
    part = tl.program_id(1)
    if PARTS > 1:
        if part == 1:
            weight, out, size, stride = weight_1, out_1, size_1, stride_1
            if bias is not None:
                bias = bias_1
    if PARTS > 2:
        if part == 2:
            weight, out, size, stride = weight_2, out_2, size_2, stride_2
            if bias is not None:
                bias = bias_2
    if PARTS > 3:
        if part == 3:
            weight, out, size, stride = weight_3, out_3, size_3, stride_3
            if bias is not None:
                bias = bias_3
    gate = (LISTS >> (4 * part)) & 15
    order += gate * num_rows
    count = tl.load(rank + gate * (num_rows + 1) + num_rows)
    tiles = size // COLUMNS
    inner = tl.arange(0, SUMMED)
    for tile in range(tl.program_id(0), tl.cdiv(count, ROWS) * tiles, tl.num_programs(0)):
        slots = tile // tiles * ROWS + tl.arange(0, ROWS)
        exists = slots < count
        rows = tl.load(order + slots, mask=exists, other=0).to(tl.int64)
        columns = tile % tiles * COLUMNS + tl.arange(0, COLUMNS)
        x_at = x + rows[:, None] * width_in + inner[None, :]
        weight_at = weight + columns.to(tl.int64)[None, :] * stride_out + inner[:, None] * stride_in
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for first in range(0, width_in, SUMMED):
            matrix = tl.load(weight_at + first * stride_in)
            total = tl.dot(tl.load(x_at + first), matrix, total, input_precision="ieee")
        if bias is not None:
            total += tl.load(bias + columns).to(tl.float32)[None, :]
        total = _activated(total, ACTIVATION)
        to = rows if AT_TOKENS else slots.to(tl.int64)
        out_at = out + to[:, None] * stride + columns[None, :]
        tl.store(out_at, total.to(out.dtype.element_ty), mask=exists[:, None])


@jit
def _combine(
    x,
    order,
    patterns,
    weight,
    bias,
    out,
    num_rows,
    width_part,
    width_out,
    stride_out,
    stride_in,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SUMMED: tl.constexpr,
):
    """`out[i] = bias + sum_m g_m[i] x_m[i] weight_m^T`, of every token: `x` `[n, PARTS * width_part]`,
    where closed parts may hold anything; `order` `[n]`, tokens of the same gates side by side. A tile
    computes the parts that any of its tokens has. Programs: any."""
    tiles = width_out // COLUMNS
    steps = width_part // SUMMED
    inner = tl.arange(0, SUMMED)
    for tile in range(tl.program_id(0), tl.cdiv(num_rows, ROWS) * tiles, tl.num_programs(0)):
        slots = tile // tiles * ROWS + tl.arange(0, ROWS)
        exists = slots < num_rows
        rows = tl.load(order + slots, mask=exists, other=0).to(tl.int64)
        bits = tl.load(patterns + rows, mask=exists, other=0)
        parts = 0  # the open ones, four bits each
        number = 0
        for part in tl.static_range(PARTS):
            is_open = tl.max((bits >> part) & 1, 0)
            parts |= (is_open * part) << (4 * number)
            number += is_open
        columns = tile % tiles * COLUMNS + tl.arange(0, COLUMNS)
        x_at = x + rows[:, None] * (PARTS * width_part) + inner[None, :]
        weight_at = weight + columns.to(tl.int64)[None, :] * stride_out + inner[:, None] * stride_in
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        # one loop over all parts keeps the loads going
        for step in range(number * steps):
            own = (parts >> (4 * (step // steps))) & 15
            first = own * width_part + step % steps * SUMMED
            is_own = ((bits >> own) & 1) == 1
            of_part = tl.load(x_at + first, mask=is_own[:, None], other=0.0)
            matrix = tl.load(weight_at + first * stride_in)
            total = tl.dot(of_part, matrix, total, input_precision="ieee")
        if bias is not None:
            total += tl.load(bias + columns).to(tl.float32)[None, :]
        out_at = out + rows[:, None] * width_out + columns[None, :]
        tl.store(out_at, total.to(out.dtype.element_ty), mask=exists[:, None])


# --- attention ------------------------------------------------------------------------------------


@jit
def _attend(
    query,
    key,
    value,
    query_order,
    query_rank,
    key_order,
    key_rank,
    mask,
    visible,
    bias,
    out,
    num_queries,
    num_keys,
    heads,
    groups,
    scaling,
    mask_batch,
    mask_query,
    mask_key,
    visible_batch,
    visible_query,
    bias_batch,
    bias_head,
    bias_query,
    bias_key,
    HEAD_DIM: tl.constexpr,
    CAUSAL: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Attention of each sequence's open queries to its open keys: `query` `[*, heads * HEAD_DIM]`, `key`
    and `value` `[*, heads / groups * HEAD_DIM]`, side by side in their orders, and `out`
    `[n, heads * HEAD_DIM]`, at the tokens' places. A closed key that a query sees has score 0, or its
    bias, and value 0.

    A query sees what `mask` says, and `visible` how many keys that are; without a mask all, or CAUSAL,
    those up to it. `bias` is added to the scores, if it is not None. Programs: sequences times heads,
    times tiles of QUERIES positions."""
    sequence, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    query_rank += sequence * num_queries
    key_rank += sequence * num_keys
    first_query = tl.load(query_rank) + tl.program_id(1) * QUERIES
    last_query = tl.load(query_rank + num_queries)
    if first_query >= last_query:
        return
    first_key = tl.load(key_rank)
    last_key = tl.load(key_rank + num_keys)
    queries = first_query + tl.arange(0, QUERIES)
    exists = queries < last_query
    rows = tl.load(query_order + queries, mask=exists, other=0)
    positions = tl.where(exists, rows - sequence * num_queries, 0)
    inner = tl.arange(0, HEAD_DIM)
    width = heads * HEAD_DIM
    query_at = query + queries.to(tl.int64)[:, None] * width + head * HEAD_DIM + inner[None, :]
    q = tl.load(query_at, mask=exists[:, None], other=0.0)
    kv_width = heads // groups * HEAD_DIM
    kv_first = head // groups * HEAD_DIM
    sees = tl.zeros((QUERIES,), dtype=tl.int32) + last_key - first_key  # open keys
    all_keys = tl.zeros((QUERIES,), dtype=tl.int32) + num_keys
    if mask is not None:
        sees = tl.zeros((QUERIES,), dtype=tl.int32)
        visible_at = visible + sequence * visible_batch + positions * visible_query
        all_keys = tl.load(visible_at, mask=exists, other=0)
        mask += sequence.to(tl.int64) * mask_batch
    elif CAUSAL:
        sees = tl.load(key_rank + positions + 1, mask=exists, other=0) - first_key
        all_keys = positions + 1
        last_key = first_key + tl.max(tl.where(exists, sees, 0), 0)
    if bias is not None:
        bias += sequence.to(tl.int64) * bias_batch + head.to(tl.int64) * bias_head

    largest = tl.zeros((QUERIES,), dtype=tl.float32) + float("-inf")
    total = tl.zeros((QUERIES,), dtype=tl.float32)
    context = tl.zeros((QUERIES, HEAD_DIM), dtype=tl.float32)
    for first in range(first_key, last_key, KEYS):
        keys = first + tl.arange(0, KEYS)
        is_key = keys < last_key
        at = keys.to(tl.int64) * kv_width + kv_first
        k = tl.load(key + at[None, :] + inner[:, None], mask=is_key[None, :], other=0.0)
        v = tl.load(value + at[:, None] + inner[None, :], mask=is_key[:, None], other=0.0)
        scores = tl.dot(q, k, input_precision="ieee") * scaling
        is_seen = is_key[None, :] & exists[:, None]
        if mask is not None or bias is not None:
            key_rows = tl.load(key_order + keys, mask=is_key, other=0)
            places = tl.where(is_key, key_rows - sequence * num_keys, 0)
            if bias is not None:
                bias_at = bias + positions[:, None] * bias_query + places[None, :] * bias_key
                added = tl.load(bias_at, mask=is_seen, other=0.0).to(tl.float32)
                scores += added * 1.4426950408889634
        if mask is not None:
            mask_at = mask + positions[:, None] * mask_query + places[None, :] * mask_key
            is_seen = tl.load(mask_at, mask=is_seen, other=0) != 0
            sees += tl.sum(is_seen.to(tl.int32), 1)
        elif CAUSAL:
            is_seen = is_seen & ((keys - first_key)[None, :] < sees[:, None])
        scores = tl.where(is_seen, scores, float("-inf"))
        now = tl.maximum(largest, tl.max(scores, 1))
        shift = tl.where(now == float("-inf"), 0.0, now)
        weights = tl.exp2(scores - shift[:, None])
        shrink = tl.exp2(largest - shift)
        total = total * shrink + tl.sum(weights, 1)
        context = tl.dot(weights.to(v.dtype), v, context * shrink[:, None], input_precision="ieee")
        largest = now

    if bias is None:
        closed = (all_keys - sees).to(tl.float32)
        now = tl.where(closed > 0, tl.maximum(largest, 0.0), largest)
        shift = tl.where(now == float("-inf"), 0.0, now)
        shrink = tl.exp2(largest - shift)
        total = total * shrink + closed * tl.exp2(-shift)
        context *= shrink[:, None]
    else:  # a closed key's score is its bias
        end = num_keys
        if CAUSAL:
            end = tl.max(tl.where(exists, positions, 0), 0) + 1
        for first in range(0, end, KEYS):
            places = first + tl.arange(0, KEYS)
            is_key = places < end
            before = tl.load(key_rank + places, mask=is_key, other=0)
            is_closed = is_key & (tl.load(key_rank + places + 1, mask=is_key, other=1) == before)
            is_seen = is_closed[None, :] & exists[:, None]
            if mask is not None:
                mask_at = mask + positions[:, None] * mask_query + places[None, :] * mask_key
                is_seen = tl.load(mask_at, mask=is_seen, other=0) != 0
            elif CAUSAL:
                is_seen = is_seen & (places[None, :] <= positions[:, None])
            bias_at = bias + positions[:, None] * bias_query + places[None, :] * bias_key
            scores = tl.load(bias_at, mask=is_seen, other=0.0).to(tl.float32) * 1.4426950408889634
            scores = tl.where(is_seen, scores, float("-inf"))
            now = tl.maximum(largest, tl.max(scores, 1))
            shift = tl.where(now == float("-inf"), 0.0, now)
            shrink = tl.exp2(largest - shift)
            total = total * shrink + tl.sum(tl.exp2(scores - shift[:, None]), 1)
            context *= shrink[:, None]
            largest = now
    context = context / tl.where(total == 0, 1.0, total)[:, None]  # 0: it sees nothing
    out_at = out + rows.to(tl.int64)[:, None] * width + head * HEAD_DIM + inner[None, :]
    tl.store(out_at, context.to(out.dtype.element_ty), mask=exists[:, None])


# --- the operators --------------------------------------------------------------------------------


def order_tokens(gates: Tensor, sort: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of gates `[n, M]`, zero where closed: the order of the tokens for each gate, those that it lets
    through in front, `[M, n]`; how many of them come before each token, `[M, n + 1]`; the tokens' bits
    `[n]`; and with `sort` all tokens, those of the same gates side by side, `[n]`."""
    number, parts = gates.shape
    tiles = triton.cdiv(number, BLOCK)

    def numbers(*shape: int) -> Tensor:
        return gates.new_empty(shape, dtype=torch.int32)

    order, rank, patterns = numbers(parts, number), numbers(parts, number + 1), numbers(number)
    in_tiles = numbers(tiles, 2**parts) if tiles > 1 else None
    by_pattern = numbers(number if sort else 0)
    gates = gates.contiguous()
    with torch.cuda.device_of(gates):
        if in_tiles is not None:
            _find_patterns[(tiles,)](
                gates, patterns, in_tiles, number, PARTS=parts, BLOCK=BLOCK, num_warps=4
            )
        _put_in_order[(tiles,)](
            gates,
            patterns,
            in_tiles,
            order,
            rank,
            by_pattern if sort else None,
            number,
            tiles,
            PARTS=parts,
            BLOCK=BLOCK,
            CHUNK=_CHUNK,
            num_warps=4,
        )
    return order, rank, patterns, by_pattern


def project_tokens(
    x: Tensor,
    order: Tensor,
    rank: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    gates: Sequence[int],
    activation: str,
    at_tokens: bool,
) -> list[Tensor]:
    """`activation(x W^T + b)` of the tokens that each part's gate lets through, for up to four parts.

    Args:
        x: `[n, d]`.
        order, rank: of `order_tokens`.
        weights: `[size, d]` each; best of the same strides.
        biases: `[size]` each, or none.
        gates: of each part.
        activation: "", or one of `ACTIVATIONS`.
        at_tokens: rows are put at their tokens' places, of all parts side by side in one tensor.

    Returns:
        `[n, size]` of each part, rows side by side, or one `[n, sum of sizes]`. The rest is not written.
    """
    number, width = x.shape
    sizes = [weight.shape[0] for weight in weights]
    if at_tokens:
        found = [x.new_empty(number, sum(sizes))]
        rows = list(found[0].split(sizes, dim=1))
    else:
        found = rows = [x.new_empty(number, size) for size in sizes]
    fill: list[Any] = [None] * (4 - len(rows))
    added: list[Any] = [*biases] or [None] * len(rows)
    tiles = _tiles(number, math.gcd(*sizes), width)
    if len({weight.stride() for weight in weights}) > 1:
        weights = [weight.contiguous() for weight in weights]
    worst = triton.cdiv(number, tiles.rows) * (max(sizes) // tiles.columns)
    with torch.cuda.device_of(x):
        _project[(min(worst, resident_programs(x.device)), len(rows))](
            x.contiguous(),
            order,
            rank,
            *weights,
            *fill,
            *added,
            *fill,
            *rows,
            *fill,
            number,
            width,
            *sizes,
            *[0] * len(fill),
            *weights[0].stride(),
            *(each.stride(0) for each in rows),
            *[0] * len(fill),
            PARTS=len(rows),
            LISTS=sum(gate << (4 * part) for part, gate in enumerate(gates)),
            AT_TOKENS=at_tokens,
            ACTIVATION=activation,
            **tiles.constants(),
        )
    return found


def combine_tokens(
    x: Tensor,
    order: Tensor,
    patterns: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    parts: int,
) -> Tensor:
    """`b + sum_m g_m x_m W_m^T` of every token, `[n, out]`.

    Args:
        x: `[n, in]`, of M parts side by side; what is closed is not read.
        order: `[n]`, all tokens, those with the same gates side by side.
        patterns: `[n]`, the tokens' bits.
        weight: `[out, in]`.
        bias: `[out]`, or None.
        parts: M, of the first gates.
    """
    number, width = x.shape
    size = weight.shape[0]
    out = x.new_empty(number, size)
    tiles = _tiles(number, size, width // parts)
    worst = triton.cdiv(number, tiles.rows) * (size // tiles.columns)
    with torch.cuda.device_of(x):
        _combine[(min(worst, resident_programs(x.device)),)](
            x.contiguous(),
            order,
            patterns,
            weight,
            bias,
            out,
            number,
            width // parts,
            size,
            *weight.stride(),
            PARTS=parts,
            **tiles.constants(),
        )
    return out


def attend_tokens(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_order: Tensor,
    query_rank: Tensor,
    key_order: Tensor,
    key_rank: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    batch: int,
    head_dim: int,
    scaling: float,
    causal: bool,
) -> Tensor:
    """Contexts of the open queries, at their tokens' places, `[B * T, heads * dh]`; the rest is not
    written.

    Args:
        query: `[*, heads * dh]`, in the order of the open queries.
        key, value: `[*, kv_heads * dh]`, in that of the open keys.
        query_order, key_order: `[B * T]` and `[B * S]`.
        query_rank, key_rank: `[B * T + 1]` and `[B * S + 1]`.
        mask: `[B or 1, 1, T or 1, S]` bool, what queries see; None for all.
        bias: `[B or 1, heads, T, S]`, added to the scores; None for none.
        batch, head_dim, scaling: B, dh, and the factor of the scores.
        causal: without a mask, queries see no later key.
    """
    heads = query.shape[1] // head_dim
    length, keys = query_order.shape[0] // batch, key_order.shape[0] // batch
    out = query.new_empty(query_order.shape[0], query.shape[1])
    shown = of_mask = of_visible = of_bias = None
    if mask is not None:
        shape = batch, 1, length, keys
        shown = mask.expand(shape).view(torch.uint8)
        of_mask = shown.stride()
        visible = mask.sum(dim=-1, dtype=torch.int32).expand(shape[:3])
        of_visible = visible.stride()
    if bias is not None:
        of_bias = bias.expand(batch, heads, length, keys).stride()
    with torch.cuda.device_of(query):
        _attend[(batch * heads, triton.cdiv(length, _QUERIES))](
            query.contiguous(),
            key.contiguous(),
            value.contiguous(),
            query_order,
            query_rank,
            key_order,
            key_rank,
            shown,
            None if mask is None else visible,
            bias,
            out,
            length,
            keys,
            heads,
            heads * head_dim // key.shape[1],
            scaling * math.log2(math.e),
            *((0, 0, 0) if of_mask is None else (of_mask[0], of_mask[2], of_mask[3])),
            *((0, 0) if of_visible is None else (of_visible[0], of_visible[2])),
            *((0, 0, 0, 0) if of_bias is None else of_bias),
            HEAD_DIM=head_dim,
            CAUSAL=causal,
            QUERIES=_QUERIES,
            **_attention_tiles(head_dim),
        )
    return out


OPERATORS: dict[str, Callable[..., Any]] = {
    "order_tokens": order_tokens,
    "project_tokens": project_tokens,
    "combine_tokens": combine_tokens,
    "attend_tokens": attend_tokens,
}

_QUERIES = 64  # that a program of attention takes at once


def _attention_tiles(head_dim: int) -> dict[str, int]:
    """As many keys at once as stay in registers."""
    if head_dim <= 64:
        return {"KEYS": 64, "num_warps": 4, "num_stages": 2}
    return {"KEYS": 32, "num_warps": 8, "num_stages": 2}


class _Tiles(NamedTuple):
    """Of a product: tokens, columns, and what is summed up at once."""

    rows: int
    columns: int
    summed: int
    num_warps: int

    def constants(self) -> dict[str, int]:
        """For the kernels."""
        return {
            "ROWS": self.rows,
            "COLUMNS": self.columns,
            "SUMMED": self.summed,
            "num_stages": 3,
            "num_warps": self.num_warps,
        }


def _tiles(number: int, columns: int, summed: int) -> _Tiles:
    """For so many tokens and sizes, which 16 divides."""
    if number >= _MANY:
        return _Tiles(128, _power(columns, 128), _power(summed, 64), 8)
    if number <= 16:  # a decoding step reads matrices: as much of them at once as there is room for
        return _Tiles(16, _power(columns, 16), _power(summed, 512), 4)
    if number <= 64:
        return _Tiles(64, _power(columns, 32), _power(summed, 128), 4)
    return _Tiles(64, _power(columns, 64), _power(summed, 128), 4)


_MANY = 2048


def _power(size: int, most: int) -> int:
    """The largest power of 2 that divides a size, up to `most`."""
    return min(size & -size, most)
