"""Parameter groups of an optimiser: gates, and the biases of budgets, with learning rates of their own.

groups = parameter_groups(model, weight_decay=0.01, gate_learning_rate=1e-3)
optimizer = torch.optim.AdamW(groups, lr=2e-5)
trainer = Trainer(model, args, optimizers=(optimizer, None), ...)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers.trainer_pt_utils import get_parameter_names

from hf_moa.modeling.core.mechanism import gate_kinds, gated_mechanisms
from hf_moa.modeling.core.sharding import mesh_of

BUDGET_BIAS = "budget_bias"
BUDGET_BIAS_LEARNING_RATE = 0.05
# as `Trainer.get_decay_parameter_names`; and CCT's norms of feed-forward parts, which it does not know
_NOT_DECAYED = [
    r"bias",
    r"layernorm",
    r"rmsnorm",
    r"(?:^|\.)norm(?:$|\.)",
    r"_norm(?:$|\.)",
    r"_norms\.",
]


def parameter_groups(
    model: nn.Module,
    *,
    weight_decay: float = 0.0,
    gate_learning_rate: float | Mapping[str, float] | None = None,
    budget_bias_learning_rate: float | None = BUDGET_BIAS_LEARNING_RATE,
) -> list[dict[str, Any]]:
    """Groups for an optimiser: every parameter that learns is in exactly one.

    Weights decay as in transformers' `Trainer`: all but biases and norms. Groups without an "lr" take
    the optimiser's; a schedule scales each group's own. Parameters that are spread over processes, and
    those that are not, are in different groups: PyTorch's optimisers take no such mixture at once.

    Args:
        model: gated, or any other; it may be wrapped or have adapters.
        weight_decay: of the weights that decay.
        gate_learning_rate: of the gates (see `gate_kinds_of`); or a rate for each kind, such as
            `{"cct": 1e-3, "router": 1e-4}`. None: that of the optimiser.
        budget_bias_learning_rate: of the parameters named `budget_bias`, which move a layer's gates at
            one budget; None: that of the optimiser.

    Returns:
        Groups with "params", "weight_decay" and, where it is their own, "lr".

    Raises:
        ValueError: a rate that is no positive number, or of a kind of gates that there is not.

    Example:
        >>> torch.optim.AdamW(parameter_groups(model, gate_learning_rate=1e-3), lr=2e-5)
        >>> Trainer(optimizer_cls_and_kwargs=(torch.optim.AdamW, {"params": groups, "lr": 2e-5}), ...)
    """
    rates = own_rates(
        model,
        gate_learning_rate=gate_learning_rate,
        budget_bias_learning_rate=budget_bias_learning_rate,
    )
    decayed = decay_parameter_names(model)
    groups: dict[tuple[Any, ...], dict[str, Any]] = {
        (None, decay, None): {"params": [], "weight_decay": decay} for decay in (weight_decay, 0.0)
    }
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        rate, decay = rates.get(parameter), weight_decay if name in decayed else 0.0
        own: dict[str, Any] = {"params": [], "weight_decay": decay}
        own |= {} if rate is None else {"lr": rate}
        groups.setdefault((rate, decay, mesh_of(parameter)), own)["params"].append(parameter)
    return [group for group in groups.values() if group["params"]]


def decay_parameter_names(model: nn.Module) -> list[str]:
    """Names of the parameters that weight decay is for."""
    return get_parameter_names(model, [nn.LayerNorm], _NOT_DECAYED)


def gate_kinds_of(model: nn.Module) -> dict[nn.Parameter, str]:
    """The parameters of a model's gates, and of which kind each is: "mae", "router", "cct" (with the
    control symbols), or what another mechanism calls its own."""
    of_modules = {name: m.gate_kind for m in gated_mechanisms() for name in m.gate_modules}
    found: dict[nn.Parameter, str] = {}
    for name, module in model.named_modules():
        kind = getattr(module, "gate_kind", None) or of_modules.get(name.split(".")[-1])
        if isinstance(kind, str):
            found |= {p: kind for p in module.parameters() if p not in found}
    return found


def own_rates(
    model: nn.Module,
    *,
    gate_learning_rate: float | Mapping[str, float] | None,
    budget_bias_learning_rate: float | None,
) -> dict[nn.Parameter, float]:
    """The parameters that have a learning rate of their own: see `parameter_groups`."""
    of_kinds = gate_learning_rate if isinstance(gate_learning_rate, Mapping) else {}
    known = gate_kinds()
    for kind, rate in of_kinds.items():
        if kind not in known:
            raise ValueError(
                f"gate_learning_rate must be of {', '.join(sorted(map(repr, known)))} (got {kind!r})."
            )
        check_learning_rate("gate_learning_rate", rate)
    if not isinstance(gate_learning_rate, Mapping) and gate_learning_rate is not None:
        check_learning_rate("gate_learning_rate", gate_learning_rate)
        of_kinds = dict.fromkeys(known, gate_learning_rate)
    rates = {p: of_kinds[kind] for p, kind in gate_kinds_of(model).items() if kind in of_kinds}
    if budget_bias_learning_rate is not None:
        check_learning_rate("budget_bias_learning_rate", budget_bias_learning_rate)
        for name, parameter in model.named_parameters():
            if BUDGET_BIAS in name.split("."):
                rates[parameter] = budget_bias_learning_rate
    return rates


def give_own_rates(
    optimizer: torch.optim.Optimizer, model: nn.Module, args: Any, *, with_gates: bool = True
) -> None:
    """Move parameters of an optimiser into groups with the learning rates of their own. All else of
    their groups stays as it is, and so do groups that hold none of them.

    Args:
        optimizer: made for the model.
        model: as for `parameter_groups`.
        args: `GateTrainingArguments`.
        with_gates: whether their rate is for gates in this optimiser: it is not in block coordinate
            descent, which has an optimiser of its own.
    """
    rates = own_rates(
        model,
        gate_learning_rate=args.gate_learning_rate if with_gates else None,
        budget_bias_learning_rate=args.budget_bias_learning_rate,
    )
    for group in list(optimizer.param_groups):
        moved: dict[tuple[float, Any], list[nn.Parameter]] = {}
        for parameter in group["params"]:
            if parameter in rates:
                moved.setdefault((rates[parameter], mesh_of(parameter)), []).append(parameter)
        if moved:
            group["params"] = [p for p in group["params"] if p not in rates]
        for (rate, _), parameters in moved.items():
            optimizer.add_param_group({**group, "params": parameters, "lr": rate})


def check_learning_rate(name: str, value: Any) -> None:
    """Raise a ValueError unless it is a positive number."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise ValueError(f"{name} must be a positive number (got {value!r}).")
