"""Gates that decide nothing yet: they still are as `upcycle` starts them."""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_moa.modeling.core.mechanism import MECHANISMS


def untrained_mechanisms(model: nn.Module) -> list[str]:
    """The mechanisms, by name, of whose gates every one gives all inputs the same: the last layer has no
    weights but zeros."""
    found: dict[str, bool] = {}
    for module in model.modules():
        kind: Any = getattr(module, "gate_kind", None)
        if kind is not None and hasattr(module, "last_layer"):
            found[kind] = found.get(kind, True) and _is_constant(module)
    return [m.name for m in MECHANISMS.values() if m.gate_kind is not None and found.get(m.gate_kind)]


def _is_constant(gate: Any) -> bool:
    biases = getattr(gate, "budget_bias", None)
    is_moved = biases is not None and bool(biases.any())
    return not is_moved and not bool(getattr(gate, gate.last_layer).weight.any())
