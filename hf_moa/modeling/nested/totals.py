"""What nested budgets add to an output: the budget, and the share of the matrices that it uses."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.budgets import made_on
from ..core.records import LayerRecord
from ..core.slots import TOTALS
from ..core.totals import Call, Totals
from .budgets import NestedUse


@TOTALS.filled_by("nested")
def nested_totals(records: list[LayerRecord], call: Call) -> Totals:
    """`budget`, `compute_cost` and `compute_fraction`, of the projections and the feed-forward matrices
    of all layers, for all tokens. (Scores are the heads' share, whatever the length.)"""
    index, control = call.budget.index, call.control
    attentions = [each.use for each in (records[0].attention, records[0].cross_attention) if each]
    feed_forward: NestedUse = records[0].feed_forward.use
    head = sum(use.macs for use in attentions)
    macs = [
        float(len(shape.layers) * (shape.heads * head + shape.neurons * feed_forward.macs))
        for shape in control.shapes
    ]
    used = made_on(index.device, macs)[index]
    both = torch.stack([used, torch.full_like(used, macs[0])], dim=-1)
    fields = {
        "budget": made_on(index.device, [float(value) for value in control.values])[index],
        "compute_cost": both * _tokens(attentions[0], both),
        "compute_fraction": used / macs[0],
    }
    return Totals({}, fields)


def _tokens(use: NestedUse, like: Tensor) -> Tensor | int:
    """How many real tokens each sequence has, `[B, 1]`."""
    if use.padding_mask is None:
        return use.length
    return use.padding_mask.sum(dim=-1, keepdim=True).to(like)
