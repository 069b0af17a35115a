"""Model outputs: transformers' own, with the fields of the gates; and how layers' records add up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.modeling_outputs import (
    BaseModelOutputWithPoolingAndCrossAttentions,
    MaskedLMOutput,
    MultipleChoiceModelOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.utils import ModelOutput

from .cct import Budget
from .cct_costs import budget_loss, compute_fraction
from .configuration_gating import GATING_OUTPUT_FIELDS


@dataclass
class GatingOutput(ModelOutput):
    """The fields that gates add to an output. Each is None where it does not apply.

    Attributes:
        aux_loss: scalar, the weighted sum of the auxiliary terms over all layers. In training mode
            `loss` includes it; in eval `loss` is the task's alone.
        aux_losses: the unweighted terms by name, each a scalar without gradient, for logging.
        compute_fraction: `[B]`, share of the gated computation that CCT carried out.
        router_logits: with `output_router_logits=True`, one `[B, T, N]` per MoA attention.
        expert_weights: with `output_expert_weights=True`, the gate's distribution over experts, one
            `[B, E]` per MAE attention (`[B, T, E]` where causal).
        cct_gates: with `output_cct_gates=True`, one dict per layer: `kv` `[B, S]`, `query` `[B, T]`,
            `ffn` `[B, T, M]` and, with cross-attention, `cross_kv` and `cross_query`.
        cross_router_logits, cross_expert_weights: the same for cross-attention.
    """

    aux_loss: Tensor | None = None
    aux_losses: dict[str, Tensor] | None = None
    compute_fraction: Tensor | None = None
    router_logits: tuple[Tensor, ...] | None = None
    expert_weights: tuple[Tensor, ...] | None = None
    cct_gates: tuple[dict[str, Tensor], ...] | None = None
    cross_router_logits: tuple[Tensor, ...] | None = None
    cross_expert_weights: tuple[Tensor, ...] | None = None


def gating_fields(outputs: ModelOutput) -> dict[str, Any]:
    """The gates' fields of a base model's output, for the output of its head."""
    return {name: outputs[name] for name in GATING_OUTPUT_FIELDS if outputs.get(name) is not None}


def collect_gating(
    config,
    records: list[dict[str, dict[str, Any]]],
    *,
    budget: Budget | None,
    budgets: list[float] | None,
    requested: dict[str, bool],
) -> dict[str, Any]:
    """Add up the records of all layers to the fields of `GatingOutput`.

    Args:
        config: a `GatingConfig`, for the coefficients.
        records: one dict per layer: sub-layer name ("self", "cross", "ffn") -> its record.
        budget: the budgets of the call, with CCT.
        budgets: the distinct budgets that `budget.index` points into.
        requested: `router_logits`, `expert_weights`, `cct_gates` -> whether to return them.
    """
    per_layer: dict[str, list[Tensor]] = {}
    for layer in records:
        for record in layer.values():
            for name, loss in record.get("losses", {}).items():
                per_layer.setdefault(name, []).append(loss)
    terms = {name: _total(losses) for name, losses in per_layer.items()}
    fields: dict[str, Any] = {}
    if budget is not None:
        parts = [record for layer in records for record in layer.values() if "used_cost" in record]
        used = _total([record["used_cost"] for record in parts])
        full = _total([record["full_cost"] for record in parts])
        terms["budget_loss"] = budget_loss(
            used, full, index=budget.index.to(used.device), budgets=budgets
        )
        fields["compute_fraction"] = compute_fraction(used, full).detach()
    if terms:
        coefficients = {
            "router_balance_loss": config.router_balance_loss_coef,
            "router_z_loss": config.router_z_loss_coef,
            "router_importance_loss": config.router_importance_loss_coef,
            "router_load_loss": config.router_load_loss_coef,
            "budget_loss": config.cct_budget_loss_coef,
        }
        # a term that weighs nothing stays out of the graph
        weighted = [coefficients[name] * term for name, term in terms.items() if coefficients[name]]
        if weighted:
            fields["aux_loss"] = _total(weighted)
        fields["aux_losses"] = {name: term.detach() for name, term in terms.items()}
    for name in ("router_logits", "expert_weights"):
        if requested[name]:
            fields[name] = _per_layer(records, "self", name)
            fields[f"cross_{name}"] = _per_layer(records, "cross", name)
    if requested["cct_gates"] and budget is not None:
        fields["cct_gates"] = tuple(_cct_gates(layer) for layer in records)
    return {name: value for name, value in fields.items() if value is not None}


def _total(tensors: list[Tensor]) -> Tensor:
    """The sum of tensors that may lie on several devices, on the device of the last."""
    return sum(tensor.to(tensors[-1].device) for tensor in tensors)


def _per_layer(records: list, part: str, name: str) -> tuple[Tensor, ...] | None:
    found = tuple(layer[part][name] for layer in records if name in layer.get(part, {}))
    return found or None


def _cct_gates(layer: dict[str, dict[str, Any]]) -> dict[str, Tensor]:
    gates = {
        "kv": layer["self"]["kv_gate"],
        "query": layer["self"]["query_gate"],
        "ffn": layer["ffn"]["ffn_gate"],
    }
    if "cross" in layer:
        gates["cross_kv"] = layer["cross"]["kv_gate"]
        gates["cross_query"] = layer["cross"]["query_gate"]
    return {name: gate for name, gate in gates.items() if gate is not None}


@dataclass
class MoaModelOutput(GatingOutput, BaseModelOutputWithPoolingAndCrossAttentions):
    """Output of an encoder or decoder stack, with `GatingOutput`'s fields."""


@dataclass
class MoaMaskedLMOutput(GatingOutput, MaskedLMOutput):
    """`MaskedLMOutput` with `GatingOutput`'s fields."""


@dataclass
class MoaSequenceClassifierOutput(GatingOutput, SequenceClassifierOutput):
    """`SequenceClassifierOutput` with `GatingOutput`'s fields."""


@dataclass
class MoaTokenClassifierOutput(GatingOutput, TokenClassifierOutput):
    """`TokenClassifierOutput` with `GatingOutput`'s fields."""


@dataclass
class MoaQuestionAnsweringOutput(GatingOutput, QuestionAnsweringModelOutput):
    """`QuestionAnsweringModelOutput` with `GatingOutput`'s fields."""


@dataclass
class MoaMultipleChoiceOutput(GatingOutput, MultipleChoiceModelOutput):
    """`MultipleChoiceModelOutput` with `GatingOutput`'s fields."""
