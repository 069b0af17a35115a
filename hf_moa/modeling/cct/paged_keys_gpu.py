"""The operators of `open_operators.py` for a cache of open keys in pages (`static_compact_cache.py`), on
a GPU, in Triton.

Programs read on the device how many keys there are and in which pages, and take pages there. Each
sequence has the page of its next key already, so that a decoding step needs one kernel: it adds the
step's key, and attends.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..core.gpu_kernels import jit, resident_programs, tl, triton

_ROWS = 64  # tokens that a program takes at once, where it puts keys into pages
_PLACES = 1024  # in the cache, that it looks at at once
_FEW = 256  # keys, of which it does not pay to give programs a part each


# --- several tokens -------------------------------------------------------------------------------


@jit
def _take_pages(
    taken,
    table,
    rank,
    length,
    key_rank,
    num_tokens,
    max_length,
    num_pages,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count the open keys of new tokens behind `length` earlier ones, in `rank` `[B, 1 + max_length]`,
    and take the pages that they need, and the next one, in `table` `[B, num_pages]`. `key_rank`
    `[B * num_tokens + 1]`: the open keys before each new token. Programs: sequences."""
    sequence = tl.program_id(0)
    start = tl.load(length).to(tl.int32)
    rank += sequence.to(tl.int64) * (max_length + 1)
    table += sequence * num_pages
    key_rank += sequence * num_tokens
    past = tl.load(rank + start, mask=start <= max_length, other=0) - tl.load(key_rank)
    for first in range(0, num_tokens, BLOCK):
        tokens = first + 1 + tl.arange(0, BLOCK)
        found = tl.load(key_rank + tokens, mask=tokens <= num_tokens, other=0)
        fits = (tokens <= num_tokens) & (start + tokens <= max_length)
        tl.store(rank + start + tokens, past + found, mask=fits)
    needed = (past + tl.load(key_rank + num_tokens)) // PAGE + 1
    for first in range(0, num_pages, BLOCK):
        places = first + tl.arange(0, BLOCK)
        held = tl.load(table + places, mask=places < num_pages, other=0)
        is_new = (places < needed) & (held < 0)
        count = tl.sum(is_new.to(tl.int32), 0)
        if count > 0:
            page = tl.atomic_add(taken, count) + tl.cumsum(is_new.to(tl.int32), 0) - 1
            tl.store(table + places, page, mask=is_new)


@jit
def _put_keys(
    keys,
    values,
    positions,
    table,
    rank,
    length,
    key,
    value,
    key_rank,
    num_tokens,
    max_length,
    num_pages,
    last_page,
    PAGE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Put open keys, `key` and `value` `[*, kv_heads * HEAD_DIM]` side by side, into their pages,
    `[last_page + 1, kv_heads, PAGE, HEAD_DIM]`, and their tokens into `positions`
    `[last_page + 1, PAGE]`. What finds no page goes to the last, which nobody reads. Programs: tiles of
    new tokens, times sequences, times heads."""
    sequence, head, kv_heads = tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    start = tl.load(length).to(tl.int32)
    tokens = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = (tokens < num_tokens) & (start + tokens < max_length)
    key_rank += sequence * num_tokens
    rows = tl.load(key_rank + tokens, mask=exists, other=0)
    is_open = exists & (tl.load(key_rank + tokens + 1, mask=exists, other=0) > rows)
    rank += sequence.to(tl.int64) * (max_length + 1)
    slots = tl.load(rank + start + tokens, mask=is_open, other=0)
    pages = tl.load(table + sequence * num_pages + slots // PAGE, mask=is_open, other=0)
    pages = tl.minimum(pages, last_page).to(tl.int64)
    inner = tl.arange(0, HEAD_DIM)
    at = rows.to(tl.int64)[:, None] * (kv_heads * HEAD_DIM) + head * HEAD_DIM + inner[None, :]
    to = ((pages * kv_heads + head) * PAGE + slots % PAGE)[:, None] * HEAD_DIM + inner[None, :]
    tl.store(keys + to, tl.load(key + at, mask=is_open[:, None], other=0.0), mask=is_open[:, None])
    tl.store(values + to, tl.load(value + at, mask=is_open[:, None], other=0.0), mask=is_open[:, None])
    if head == 0:
        tl.store(positions + pages * PAGE + slots % PAGE, start + tokens, mask=is_open)


# --- one token ------------------------------------------------------------------------------------


@jit
def _attend_step(
    keys,
    values,
    positions,
    taken,
    table,
    rank,
    length,
    query,
    query_rank,
    key,
    value,
    key_rank,
    mask,
    bias,
    out,
    largest_of,
    total_of,
    closed_of,
    heads,
    groups,
    max_length,
    num_pages,
    last_page,
    scaling,
    mask_batch,
    bias_batch,
    bias_head,
    PAGE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    PLACES: tl.constexpr,
):
    """Attention of one token of each sequence to the open keys in pages and to its own, which is put
    there: `query` `[*, heads * HEAD_DIM]` and, if they are not None, `key` and `value` side by side, and
    `out` `[parts, B, heads * HEAD_DIM]`. Closed keys that a query sees have score 0, or their bias, and
    value 0. `mask` `[B, max_length]`, if it is not None: the keys that a query sees. `bias`
    `[B, heads, max_length]`, if it is not None, is added to the scores.

    Each part has some of the keys. Where there are several, `_join_parts` makes one context of theirs:
    of the largest scores, the sums of weights, and the numbers of closed keys, `[parts, B * heads]`.
    Programs: sequences times heads, times parts."""
    sequence, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    part, parts = tl.program_id(1), tl.num_programs(1)
    position = tl.load(length).to(tl.int32)
    rank += sequence.to(tl.int64) * (max_length + 1)
    table += sequence * num_pages
    before = tl.load(rank + position, mask=position <= max_length, other=0)
    kv_heads = heads // groups
    kv_head = head // groups
    inner = tl.arange(0, HEAD_DIM)
    lacks = position > max_length
    is_new = 0
    if key is not None:
        lacks = position >= max_length
        row = tl.load(key_rank + sequence)
        is_new = (tl.load(key_rank + sequence + 1) > row).to(tl.int32)
        new_at = row.to(tl.int64) * (kv_heads * HEAD_DIM) + kv_head * HEAD_DIM + inner
        k_new = tl.load(key + new_at, mask=inner < is_new * HEAD_DIM, other=0.0)
        v_new = tl.load(value + new_at, mask=inner < is_new * HEAD_DIM, other=0.0)
        own_page = tl.load(table + before // PAGE, mask=before // PAGE < num_pages, other=last_page)
        lacks |= (is_new == 1) & (own_page >= last_page)
        if (part == 0) & (head % groups == 0) & (is_new == 1):
            page = tl.minimum(own_page, last_page).to(tl.int64)
            to = ((page * kv_heads + kv_head) * PAGE + before % PAGE) * HEAD_DIM + inner
            tl.store(keys + to, k_new)
            tl.store(values + to, v_new)
            if head == 0:
                tl.store(positions + page * PAGE + before % PAGE, position)
        if (part == 0) & (head == 0) & (position < max_length):
            after = before + is_new
            tl.store(rank + position + 1, after)
            if (after % PAGE == 0) & (is_new == 1) & (after // PAGE < num_pages):
                if tl.load(table + after // PAGE) < 0:
                    tl.store(table + after // PAGE, tl.atomic_add(taken, 1))
    query_row = tl.load(query_rank + sequence)
    if tl.load(query_rank + sequence + 1) == query_row:
        return
    query += (query_row.to(tl.int64) * heads + head) * HEAD_DIM
    q = tl.load(query + inner).to(tl.float32) * scaling
    if mask is not None:
        mask += sequence.to(tl.int64) * mask_batch
    if bias is not None:
        bias += sequence.to(tl.int64) * bias_batch + head.to(tl.int64) * bias_head

    # each of KEYS lanes has some of the keys, so that nothing is summed up within the loop
    largest = tl.full((KEYS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((KEYS,), dtype=tl.float32)
    context = tl.zeros((KEYS, HEAD_DIM), dtype=tl.float32)
    seen = tl.zeros((KEYS,), dtype=tl.int32)  # open keys
    last_held = tl.zeros((KEYS,), dtype=tl.int32)
    own = tl.cdiv(tl.cdiv(before, parts), KEYS) * KEYS
    last_slot = tl.minimum(before, (part + 1) * own)
    for first in range(part * own, last_slot, KEYS):
        slots = first + tl.arange(0, KEYS)
        is_key = slots < last_slot
        held = tl.load(table + slots // PAGE, mask=is_key, other=0)
        last_held = tl.maximum(last_held, held)
        pages = tl.minimum(held, last_page).to(tl.int64)
        at = ((pages * kv_heads + kv_head) * PAGE + slots % PAGE)[:, None] * HEAD_DIM + inner[None, :]
        k = tl.load(keys + at, mask=is_key[:, None], other=0.0).to(tl.float32)
        v = tl.load(values + at, mask=is_key[:, None], other=0.0).to(tl.float32)
        scores = tl.sum(k * q[None, :], 1)
        if mask is not None or bias is not None:
            places = tl.load(positions + pages * PAGE + slots % PAGE, mask=is_key, other=0)
            if bias is not None:
                added = tl.load(bias + places, mask=is_key, other=0.0).to(tl.float32)
                scores += added * 1.4426950408889634
            if mask is not None:
                is_key = tl.load(mask + places, mask=is_key, other=0) != 0
        seen += is_key.to(tl.int32)
        scores = tl.where(is_key, scores, float("-inf"))
        now = tl.maximum(largest, scores)
        shift = tl.where(now == float("-inf"), 0.0, now)
        weights = tl.exp2(scores - shift)
        shrink = tl.exp2(largest - shift)
        total = total * shrink + weights
        context = context * shrink[:, None] + weights[:, None] * v
        largest = now
    lacks |= tl.max(last_held, 0) >= last_page

    # keys that the query sees and that are closed, by their places
    own_places = tl.cdiv(tl.cdiv(max_length, parts), PLACES) * PLACES
    last_place = tl.minimum(max_length, (part + 1) * own_places)
    largest_closed = tl.full((PLACES,), float("-inf"), dtype=tl.float32)
    total_closed = tl.zeros((PLACES,), dtype=tl.float32)
    shown = tl.zeros((PLACES,), dtype=tl.int32)
    for first in range(part * own_places, last_place, PLACES):
        places = first + tl.arange(0, PLACES)
        is_seen = places < last_place
        if mask is not None:
            is_seen = tl.load(mask + places, mask=is_seen, other=0) != 0
        shown += is_seen.to(tl.int32)
        if bias is not None:  # a closed key's score is its bias
            is_past = is_seen & (places < position)
            found = tl.load(rank + places, mask=is_past, other=0)
            is_open = tl.load(rank + places + 1, mask=is_past, other=0) > found
            is_open = is_open | ((places == position) & (is_new == 1))
            is_seen = is_seen & (is_open == 0)
            scores = tl.load(bias + places, mask=is_seen, other=0.0).to(tl.float32) * 1.4426950408889634
            scores = tl.where(is_seen, scores, float("-inf"))
            now = tl.maximum(largest_closed, scores)
            shift = tl.where(now == float("-inf"), 0.0, now)
            total_closed = total_closed * tl.exp2(largest_closed - shift) + tl.exp2(scores - shift)
            largest_closed = now

    # all lanes together
    score = float("-inf")
    closed = tl.sum(shown, 0) - tl.sum(seen, 0)
    if key is not None:
        if (part == 0) & (is_new == 1):
            score = tl.sum(k_new.to(tl.float32) * q, 0)
            is_shown = 1
            if bias is not None:
                added_own = tl.load(bias + position, mask=position < max_length, other=0.0)
                score += added_own.to(tl.float32) * 1.4426950408889634
            if mask is not None:
                shown_own = tl.load(mask + position, mask=position < max_length, other=0)
                is_shown = (shown_own != 0).to(tl.int32)
            closed -= is_shown
            score = tl.where(is_shown == 1, score, float("-inf"))
    at_most = tl.maximum(tl.max(largest, 0), tl.maximum(tl.max(largest_closed, 0), score))
    base = tl.where(at_most == float("-inf"), 0.0, at_most)
    shrink = tl.exp2(largest - base)
    total_of_all = tl.sum(total * shrink, 0)
    context_of_all = tl.sum(context * shrink[:, None], 0)
    if bias is not None:
        total_of_all += tl.sum(total_closed * tl.exp2(largest_closed - base), 0)
        closed = 0
    if key is not None:
        weight = tl.exp2(score - base)
        total_of_all += weight
        context_of_all += weight * v_new.to(tl.float32)
    total_of_all = tl.where(lacks, float("nan"), total_of_all)
    if closed_of is None:  # there is one part
        total_of_all, context_of_all = _with_closed(at_most, total_of_all, context_of_all, closed)
        # 0: it sees nothing
        context_of_all = context_of_all / tl.where(total_of_all == 0, 1.0, total_of_all)
    else:
        sums_at = part * tl.num_programs(0) + tl.program_id(0)
        tl.store(largest_of + sums_at, at_most)
        tl.store(total_of + sums_at, total_of_all)
        tl.store(closed_of + sums_at, closed)
    out += (part * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * HEAD_DIM
    tl.store(out + inner, context_of_all.to(out.dtype.element_ty))


@jit
def _with_closed(largest, total, context, closed):
    """The sum of weights and the context, with so many closed keys more, whose scores are 0."""
    now = tl.where(closed > 0, tl.maximum(largest, 0.0), largest)
    shift = tl.where(now == float("-inf"), 0.0, now)
    shrink = tl.exp2(largest - shift)
    return total * shrink + closed * tl.exp2(-shift), context * shrink


@jit
def _join_parts(
    contexts,
    largest_of,
    total_of,
    closed_of,
    query_rank,
    out,
    heads,
    HEAD_DIM: tl.constexpr,
    PARTS: tl.constexpr,
):
    """The contexts `[B, heads * HEAD_DIM]` of parts, `[PARTS, B, heads * HEAD_DIM]`; see `_attend_step`.
    Programs: sequences times heads."""
    number = tl.num_programs(0)
    sequence = tl.program_id(0) // heads
    if tl.load(query_rank + sequence + 1) == tl.load(query_rank + sequence):
        return
    parts = tl.arange(0, PARTS)
    inner = tl.arange(0, HEAD_DIM)
    at = parts * number + tl.program_id(0)
    largest = tl.load(largest_of + at)
    now = tl.max(largest, 0)
    shift = tl.where(now == float("-inf"), 0.0, now)
    shrink = tl.exp2(largest - shift)
    total = tl.sum(tl.load(total_of + at) * shrink, 0)
    at_context = at.to(tl.int64)[:, None] * HEAD_DIM + inner[None, :]
    context = tl.sum(tl.load(contexts + at_context) * shrink[:, None], 0)
    total, context = _with_closed(now, total, context, tl.sum(tl.load(closed_of + at), 0))
    context = context / tl.where(total == 0, 1.0, total)
    tl.store(out + tl.program_id(0).to(tl.int64) * HEAD_DIM + inner, context.to(out.dtype.element_ty))


# --- the operators --------------------------------------------------------------------------------


def fill_pages(
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    taken: Tensor,
    table: Tensor,
    rank: Tensor,
    length: Tensor,
    key: Tensor,
    value: Tensor,
    key_rank: Tensor,
) -> None:
    """Put the open keys of new tokens into pages, and take what pages they need.

    Args:
        keys, values, positions, taken, table, rank: of `OpenPages` and `StaticCompactLayer`.
        length: tokens before these, int64.
        key, value: `[*, kv_heads * dh]`, of the new tokens' open keys, side by side.
        key_rank: `[B * T + 1]`, how many of them come before each token.
    """
    batch, pages = table.shape
    tokens, max_length = (key_rank.shape[0] - 1) // batch, rank.shape[1] - 1
    last_page, kv_heads, page, head_dim = keys.shape[0] - 1, *keys.shape[1:]
    with torch.cuda.device_of(keys):
        _take_pages[(batch,)](
            taken, table, rank, length, key_rank, tokens, max_length, pages, PAGE=page, BLOCK=128
        )
        _put_keys[(triton.cdiv(tokens, _ROWS), batch, kv_heads)](
            keys,
            values,
            positions,
            table,
            rank,
            length,
            key.contiguous(),
            value.contiguous(),
            key_rank,
            tokens,
            max_length,
            pages,
            last_page,
            PAGE=page,
            HEAD_DIM=head_dim,
            ROWS=_ROWS,
        )


def attend_pages(
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    taken: Tensor,
    table: Tensor,
    rank: Tensor,
    length: Tensor,
    query: Tensor,
    query_rank: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    key_rank: Tensor | None,
    mask: Tensor | None,
    bias: Tensor | None,
    scaling: float,
) -> Tensor:
    """Contexts of one token of each sequence, `[B, heads * dh]`: of open queries, attending to the open
    keys in pages and to their own, which are put there. The rest is not written. NaN where keys found
    no page, or no place in the cache.

    Args:
        keys, values, positions, taken, table, rank: of `OpenPages` and `StaticCompactLayer`.
        length: tokens before this one, int64; of cross-attention the number of keys.
        query: `[*, heads * dh]`, of the open queries, side by side.
        query_rank: `[B + 1]`.
        key, value, key_rank: the same of the tokens' own keys; None in cross-attention.
        mask: `[B or 1, 1, 1, S]` bool, what queries see; None for all S.
        bias: `[B or 1, heads, 1, S]`, added to the scores; None for none.
        scaling: of the scores.
    """
    batch, pages = table.shape
    last_page, kv_heads, page, head_dim = keys.shape[0] - 1, *keys.shape[1:]
    max_length, heads = rank.shape[1] - 1, query.shape[1] // head_dim
    programs = batch * heads
    parts = _parts(programs, max_length, resident_programs(query.device))
    shown, of_mask = None, 0
    of_bias: tuple[int, ...] = (0, 0)
    if mask is not None:
        shown = _in_rows(mask.expand(batch, 1, 1, max_length)).view(torch.uint8)
        of_mask = shown.stride(0)
    if bias is not None:
        bias = _in_rows(bias.expand(batch, heads, 1, max_length))
        of_bias = bias.stride()[:2]
    out = query.new_empty(batch, heads * head_dim)
    contexts = out
    of_parts: list[Any] = [None, None, None]
    if parts > 1:
        contexts = out.new_empty(parts, *out.shape, dtype=torch.float32)
        of_parts = [contexts.new_empty(parts, programs) for _ in range(2)]
        of_parts.append(taken.new_empty(parts, programs))
    with torch.cuda.device_of(keys):
        _attend_step[(programs, parts)](
            keys,
            values,
            positions,
            taken,
            table,
            rank,
            length,
            query.contiguous(),
            query_rank,
            None if key is None else key.contiguous(),
            None if value is None else value.contiguous(),
            key_rank,
            shown,
            bias,
            contexts,
            *of_parts,
            heads,
            heads // kv_heads,
            max_length,
            pages,
            last_page,
            scaling * math.log2(math.e),
            of_mask,
            *of_bias,
            PAGE=page,
            HEAD_DIM=head_dim,
            KEYS=_keys(head_dim),
            PLACES=_PLACES,
            num_warps=4,
        )
        if parts > 1:
            _join_parts[(programs,)](
                contexts,
                *of_parts,
                query_rank,
                out,
                heads,
                HEAD_DIM=head_dim,
                PARTS=parts,
                num_warps=1,
            )
    return out


def _in_rows(x: Tensor) -> Tensor:
    """With the numbers of the last dimension side by side; copied only if they are not."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _keys(head_dim: int) -> int:
    """As many at once as stay in registers."""
    return 64 if head_dim <= 64 else 32


def _parts(programs: int, max_length: int, wanted: int) -> int:
    """In how many parts the keys are taken, so that there is work for a whole GPU: a power of 2."""
    most = min(wanted // programs, max_length // _FEW, 16)
    return 1 << (most.bit_length() - 1) if most > 1 else 1


PAGE_OPERATORS: dict[str, Callable[..., Any]] = {"fill_pages": fill_pages, "attend_pages": attend_pages}
