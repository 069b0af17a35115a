"""The distributions over experts of all layers, for an output."""

from __future__ import annotations

from torch import Tensor

from ..core.records import LayerRecord, Record
from ..core.slots import TOTALS
from ..core.totals import Call, Totals


@TOTALS.filled_by("mae")
def mae_totals(records: list[LayerRecord], call: Call) -> Totals:
    """With `output_expert_weights`, one distribution for each attention."""
    if not call.requested["expert_weights"]:
        return Totals({}, {})
    crossing = [layer.cross_attention for layer in records if layer.cross_attention is not None]
    return Totals(
        {},
        {
            "expert_weights": _weights([layer.attention for layer in records]),
            "cross_expert_weights": _weights(crossing),
        },
    )


def _weights(attentions: list[Record]) -> tuple[Tensor, ...] | None:
    weights = (record.expert_weights for record in attentions)
    return tuple(each for each in weights if each is not None) or None
