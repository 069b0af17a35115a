"""What the reports of all layers add up to: losses, and the fields of an output."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from .mechanism import mechanisms_of
from .records import LayerRecord
from .slots import TOTALS


class Call(NamedTuple):
    """What adding up has to know of a call.

    Attributes:
        config: a `GatingConfig`, for the coefficients of the losses.
        requested: `router_logits`, `expert_weights`, `cct_gates` -> whether to return them.
        budget, control: with CCT, the `Budget` of the call and the `BudgetControl` that it comes from.
    """

    config: Any
    requested: dict[str, bool]
    budget: Any = None
    control: Any = None


class Totals(NamedTuple):
    """What a mechanism adds to an output.

    Attributes:
        terms: auxiliary losses by name, each its coefficient and a scalar.
        fields: of `GatingOutput`; None for none.
    """

    terms: dict[str, tuple[float, Tensor]]
    fields: dict[str, Any]


def gating_totals(records: list[LayerRecord], call: Call) -> dict[str, Any]:
    """Add up the reports of all layers to the fields of `GatingOutput`."""
    terms: dict[str, tuple[float, Tensor]] = {}
    fields: dict[str, Any] = {}
    for mechanism in mechanisms_of(call.config):
        if mechanism.name in TOTALS:
            found = TOTALS[mechanism.name](records, call)
            terms |= found.terms
            fields |= found.fields
    if terms:
        # a term that weighs nothing stays out of the graph
        weighted = [coefficient * term for coefficient, term in terms.values() if coefficient]
        fields["aux_loss"] = total(weighted or [term.new_zeros(()) for _, term in terms.values()])
        fields["aux_losses"] = {name: term.detach() for name, (_, term) in terms.items()}
    return {name: value for name, value in fields.items() if value is not None}


def total(tensors: list[Tensor]) -> Tensor:
    """The sum of tensors that may lie on several devices, on the device of the last."""
    found: Any = sum(tensor.to(tensors[-1].device) for tensor in tensors)
    return found
