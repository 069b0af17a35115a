"""What the routers of all layers add up to: their losses, and the load of the experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..core.process_sum import sum_over_processes
from ..core.records import LayerRecord, Record
from ..core.slots import TOTALS
from ..core.totals import Call, Totals
from ..core.tracing import is_traced
from .routers import Noise, Routing

# Logits that are stacked.
_MOST_AT_ONCE = 2**20


@TOTALS.filled_by("router")
def router_totals(records: list[LayerRecord], call: Call) -> Totals:
    """The routers' losses and the experts' load, and with `output_router_logits` their logits."""
    terms, loads = router_terms(records)
    weighted = {name: (getattr(call.config, f"{name}_coef"), term) for name, term in terms.items()}
    fields: dict[str, Any] = {"expert_load": loads or None}
    if call.requested["router_logits"]:
        fields["router_logits"] = _attention_logits([layer.attention for layer in records])
        crossing = [layer.cross_attention for layer in records if layer.cross_attention is not None]
        fields["cross_router_logits"] = _attention_logits(crossing)
        fields["ffn_router_logits"] = _feed_forward_logits([layer.feed_forward for layer in records])
    return Totals(weighted, fields)


def _attention_logits(attentions: list[Record]) -> tuple[Tensor, ...] | None:
    return tuple(record.routings[0].logits for record in attentions if record.routings) or None


def _feed_forward_logits(layers: list[Record]) -> tuple[Tensor, ...] | None:
    """Of each layer `[B, T, N]`; of one whose experts CCT splits in M parts `[B, T, M, N]`."""
    found = []
    for record in layers:
        if logits := [routing.logits for routing in record.routings]:
            found.append(logits[0] if len(logits) == 1 else torch.stack(logits, dim=-2))
    return tuple(found) or None


def router_terms(records: list[LayerRecord]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The losses of all routers, and the load by the part of the layer that they serve.

    Layers that differ only in their routing are measured at once, while they have few tokens: many
    small operators for each would cost a good part of the time.

    Args:
        records: one per layer, with the routings of its routers. Where a sub-layer has several, its
            losses are the mean of theirs, and its experts those of all.

    Returns:
        Scalars by name, summed over the layers, on the device of the last; and `[layers, N]`.
    """
    terms: dict[str, Tensor] = {}
    loads: dict[str, dict[int, Tensor]] = {}
    device = _last_device(records)
    for (name, per_layer, *_), alike in _alike(records).items():
        for layers, routings, counts in _at_once(alike):
            losses, load = _stacked_routings(routings).measure(counts)
            for loss, values in losses.items():
                total = (values.sum() / per_layer).to(device)
                terms[loss] = terms[loss] + total if loss in terms else total
            # shape: (layers * routers, N) -> (layers, routers * N)
            load = load.view(len(layers), -1) / per_layer
            loads.setdefault(name, {}).update(zip(layers, load, strict=True))
    return terms, {part: _in_order(each) for part, each in loads.items()}


def _last_device(records: list[LayerRecord]) -> torch.device | None:
    """That of the last layer with routers; None without any."""
    devices = [
        routing.logits.device
        for layer in records
        for record in layer.parts.values()
        for routing in record.routings
    ]
    return devices[-1] if devices else None


def _alike(
    records: list[LayerRecord],
) -> dict[tuple, list[tuple[int, tuple[Routing, ...]]]]:
    """Number and routings of the layers that can be stacked."""
    found: dict[tuple, list[tuple[int, tuple[Routing, ...]]]] = {}
    for number, layer in enumerate(records):
        for name, record in layer.parts.items():
            if routings := record.routings:
                first = routings[0]
                is_one_token = first.logits.shape[1] == 1  # the last layer may compute one only
                kind = (first.logits.device, first.mask is None, first.noise is None, is_one_token)
                key = (name, len(routings), *kind, first.balances_globally)
                found.setdefault(key, []).append((number, routings))
    return found


def _at_once(
    alike: list[tuple[int, tuple[Routing, ...]]],
) -> Iterator[tuple[list[int], list[Routing], Tensor | None]]:
    """Layers to be stacked, their routings, and where these balance globally their experts' counts."""
    first = alike[0][1]
    number = len(alike)
    if not is_traced(first[0].logits):  # to a compiler, sizes are no numbers
        number = max(1, _MOST_AT_ONCE // max(1, len(first) * first[0].logits.numel()))
    # one sum for all: other processes, with batches of other sizes, stack other numbers of layers
    counts = None
    if first[0].balances_globally:
        own = [routing.counts() for _, routings in alike for routing in routings]
        counts = sum_over_processes(torch.stack(own))
    for start in range(0, len(alike), number):
        layers, per_layer = zip(*alike[start : start + number], strict=True)
        routings = [routing for each in per_layer for routing in each]
        place = start * len(first)
        part = None if counts is None else counts[place : place + len(routings)]
        yield list(layers), routings, part


def _stacked_routings(routings: list[Routing]) -> Routing:
    """Routings of the same sizes and tokens as one."""
    last = routings[-1]
    names = ("index", "weight", "logits")
    stacked: dict[str, Any] = {
        name: torch.stack([getattr(each, name) for each in routings]) for name in names
    }
    if last.noise is not None:
        stacked["noise"] = Noise(*map(torch.stack, zip(*(each.noise for each in routings), strict=True)))
    return last._replace(**stacked)


def _in_order(loads: dict[int, Tensor]) -> Tensor:
    """The layers' loads, which may lie on several devices, on that of the last: `[layers, N]`."""
    ordered = [loads[number] for number in sorted(loads)]
    return torch.stack([load.to(ordered[-1].device) for load in ordered])
