"""Model outputs: transformers' own, with the fields of the gates; and how layers' records add up."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import (
    BaseModelOutputWithPastAndCrossAttentions,
    BaseModelOutputWithPoolingAndCrossAttentions,
    CausalLMOutputWithCrossAttentions,
    MaskedLMOutput,
    MultipleChoiceModelOutput,
    QuestionAnsweringModelOutput,
    Seq2SeqLMOutput,
    Seq2SeqModelOutput,
    Seq2SeqQuestionAnsweringModelOutput,
    Seq2SeqSequenceClassifierOutput,
    SequenceClassifierOutput,
    SequenceClassifierOutputWithPast,
    TokenClassifierOutput,
)
from transformers.utils import ModelOutput

from ..cct.budgets import Budget, BudgetControl, made_on
from ..cct.costs import budget_loss, compute_fraction, costs_by_kind
from ..routing.totals import router_terms
from .configuration import GATING_OUTPUT_FIELDS

_OF_THE_BATCH = (
    "aux_loss",
    "encoder_aux_loss",
    "decoder_aux_loss",
    "aux_losses",
    "expert_load",
    "task_loss",
)


@dataclass
class _WithAuxLoss(ModelOutput):
    """An output some of whose fields belong to the batch, where all else has rows.

    In inference (without gradients and labels) they are attributes and no entries: transformers'
    pipelines split every entry of an output into rows, and beam search repeats each.
    """

    def __post_init__(self):
        super().__post_init__()
        trains = self.aux_loss is not None and self.aux_loss.requires_grad
        if not trains and getattr(self, "loss", None) is None:
            for name in _OF_THE_BATCH:
                if name in self:
                    OrderedDict.__delitem__(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """As its parent's, which goes through all fields for each: a good part of a decoding step."""
        if name not in self.__dataclass_fields__:
            return super().__setattr__(name, value)
        if value is not None:
            OrderedDict.__setitem__(self, name, value)
        return object.__setattr__(self, name, value)

    def to_tuple(self) -> tuple:
        """As the backbone's, the gates' fields behind: captured hidden states and attentions join an
        output last."""
        return tuple(self[field.name] for field in dataclasses.fields(self) if field.name in self)


@dataclass
class GatingOutput(_WithAuxLoss):
    """The fields that gates add to an output. Each is None where it does not apply.

    Attributes:
        aux_loss: scalar, the weighted sum of the auxiliary terms over all layers. In training mode
            `loss` includes it; in eval `loss` is the task's alone. Without gradients and labels it is
            an attribute but no entry of the output.
        aux_losses: the unweighted terms by name, each a scalar without gradient, for logging.
        task_loss: scalar, where `loss` includes auxiliary terms: the loss without them.
        expert_load: by the part of the layer that routers serve (`attention`, `cross_attention`,
            `feed_forward`), `[layers, N]`: each expert's share of the assignments, for logging.
        budget: `[B]`, the compute budget of each sequence in this call.
        compute_fraction: `[B]`, share of the gated computation that CCT carried out in this call.
        compute_cost: `[B, 2]`, that computation in multiply-accumulates: carried out, and with all
            gates open.
        router_logits: with `output_router_logits=True`, one `[B, T, N]` per MoA attention.
        expert_weights: with `output_expert_weights=True`, the gate's distribution over experts, one
            `[B, E]` per MAE attention (`[B, T, E]` where causal).
        cct_gates: with `output_cct_gates=True`, one dict per layer: `kv` `[B, S]`, `query` `[B, T]`,
            `ffn` `[B, T, M]` and, with cross-attention, `cross_kv` and `cross_query`.
        cross_router_logits, cross_expert_weights: the same for cross-attention.
    """

    aux_loss: Tensor | None = None
    aux_losses: dict[str, Tensor] | None = None
    task_loss: Tensor | None = None
    expert_load: dict[str, Tensor] | None = None
    budget: Tensor | None = None
    compute_fraction: Tensor | None = None
    compute_cost: Tensor | None = None
    router_logits: tuple[Tensor, ...] | None = None
    expert_weights: tuple[Tensor, ...] | None = None
    cct_gates: tuple[dict[str, Tensor], ...] | None = None
    cross_router_logits: tuple[Tensor, ...] | None = None
    cross_expert_weights: tuple[Tensor, ...] | None = None


@dataclass
class GatingSeq2SeqOutput(_WithAuxLoss):
    """The same for encoder-decoder models.

    Attributes:
        aux_loss, aux_losses, compute_fraction, compute_cost: of both halves together: the encoder's
            share comes with `encoder_outputs`, where a call is given those instead of running it. The
            names in `aux_losses` and `expert_load` begin with `encoder_` or `decoder_`.
        encoder_aux_loss, decoder_aux_loss: scalar, the summands of `aux_loss`.
        task_loss: scalar, where `loss` includes auxiliary terms: the loss without them.
        expert_load: by part of the layer, `[layers, N]`: each expert's share of the assignments.
        budget: `[B, 2]`, the (encoder, decoder) compute budgets of each sequence in this call.
        encoder_compute_fraction, decoder_compute_fraction: `[B]`, of each half.
        encoder_router_logits, decoder_router_logits, cross_router_logits: one `[B, T, N]` per MoA
            self-attention of the encoder and of the decoder, and per cross-attention.
        encoder_expert_weights, decoder_expert_weights, cross_expert_weights: one `[B, E]` per MAE
            attention of the encoder; `[B, T, E]` in the decoder.
        encoder_cct_gates, decoder_cct_gates: one dict per layer.
    """

    aux_loss: Tensor | None = None
    aux_losses: dict[str, Tensor] | None = None
    task_loss: Tensor | None = None
    expert_load: dict[str, Tensor] | None = None
    budget: Tensor | None = None
    compute_fraction: Tensor | None = None
    compute_cost: Tensor | None = None
    encoder_aux_loss: Tensor | None = None
    decoder_aux_loss: Tensor | None = None
    encoder_compute_fraction: Tensor | None = None
    decoder_compute_fraction: Tensor | None = None
    encoder_router_logits: tuple[Tensor, ...] | None = None
    decoder_router_logits: tuple[Tensor, ...] | None = None
    cross_router_logits: tuple[Tensor, ...] | None = None
    encoder_expert_weights: tuple[Tensor, ...] | None = None
    decoder_expert_weights: tuple[Tensor, ...] | None = None
    cross_expert_weights: tuple[Tensor, ...] | None = None
    encoder_cct_gates: tuple[dict[str, Tensor], ...] | None = None
    decoder_cct_gates: tuple[dict[str, Tensor], ...] | None = None


def gating_fields(outputs: ModelOutput) -> dict[str, Any]:
    """The gates' fields of a base model's output, for the output of its head."""
    found = {name: getattr(outputs, name, None) for name in GATING_OUTPUT_FIELDS}
    return {name: value for name, value in found.items() if value is not None}


def collect_gating(
    config,
    records: list[dict[str, dict[str, Any]]],
    *,
    budget: Budget | None,
    control: BudgetControl | None,
    requested: dict[str, bool],
) -> dict[str, Any]:
    """Add up the records of all layers to the fields of `GatingOutput`.

    Args:
        config: a `GatingConfig`, for the coefficients.
        records: one dict per layer: sub-layer name ("self", "cross", "ffn") -> its record.
        budget: the budgets of the call, with CCT.
        control: what `budget` comes from.
        requested: `router_logits`, `expert_weights`, `cct_gates` -> whether to return them.
    """
    terms, loads = router_terms(records)
    fields: dict[str, Any] = {}
    if budget is not None:
        cost = _total(costs_by_kind(records))
        index = budget.index.to(cost.device)
        terms["budget_loss"] = budget_loss(cost, index=index, budgets=control.values)
        fields["budget"] = made_on(cost.device, control.values, cost.dtype)[index]
        fields["compute_cost"] = cost.detach()
        fields["compute_fraction"] = compute_fraction(cost).detach()
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
        fields["aux_loss"] = _total(weighted or [terms[name].new_zeros(()) for name in terms])
        fields["aux_losses"] = {name: term.detach() for name, term in terms.items()}
    fields["expert_load"] = loads or None
    for name in ("router_logits", "expert_weights"):
        if requested[name]:
            fields[name] = _per_layer(records, "self", name)
            fields[f"cross_{name}"] = _per_layer(records, "cross", name)
    if requested["cct_gates"] and budget is not None:
        fields["cct_gates"] = tuple(_cct_gates(layer) for layer in records)
    return {name: value for name, value in fields.items() if value is not None}


def merge_gating(encoder: ModelOutput, decoder: ModelOutput) -> dict[str, Any]:
    """The fields of `GatingSeq2SeqOutput` from the two halves' outputs.

    Args:
        encoder: of the encoder, perhaps of an earlier call; one that knows no gates adds nothing.
        decoder: of the decoder.
    """
    halves = {"encoder": encoder, "decoder": decoder}
    fields: dict[str, Any] = {
        f"{half}_{name}": getattr(outputs, name, None)
        for half, outputs in halves.items()
        for name in ("aux_loss", "compute_fraction", "router_logits", "expert_weights", "cct_gates")
    }
    for name in ("cross_router_logits", "cross_expert_weights"):
        fields[name] = decoder.get(name)
    for name in ("aux_loss", "compute_cost"):
        found = [getattr(outputs, name, None) for outputs in halves.values()]
        found = [tensor for tensor in found if tensor is not None]
        fields[name] = _total(found) if found else None
    if fields["compute_cost"] is not None:
        fields["compute_fraction"] = compute_fraction(fields["compute_cost"])
    for field in ("aux_losses", "expert_load"):
        fields[field] = {
            f"{half}_{name}": value
            for half, outputs in halves.items()
            for name, value in (getattr(outputs, field, None) or {}).items()
        } or None
    budgets = [getattr(outputs, "budget", None) for outputs in halves.values()]
    if all(budget is not None for budget in budgets):
        fields["budget"] = torch.stack([budget.to(budgets[-1]) for budget in budgets], dim=-1)
    return {name: value for name, value in fields.items() if value is not None}


def _total(tensors: list[Tensor]) -> Tensor:
    """The sum of tensors that may lie on several devices, on the device of the last."""
    return sum(tensor.to(tensors[-1].device) for tensor in tensors)


def _per_layer(records: list, part: str, name: str) -> tuple[Tensor, ...] | None:
    found = tuple(layer[part][name] for layer in records if name in layer.get(part, {}))
    return found or None


def _cct_gates(layer: dict[str, dict[str, Any]]) -> dict[str, Tensor]:
    uses = {name: record["use"] for name, record in layer.items()}
    gates = {"kv": uses["self"].kv, "query": uses["self"].query, "ffn": uses["ffn"].gates}
    if "cross" in uses:
        gates["cross_kv"], gates["cross_query"] = uses["cross"].kv, uses["cross"].query
    return {name: gate for name, gate in gates.items() if gate is not None}


@dataclass
class MoaBaseModelOutput(GatingOutput, BaseModelOutputWithPastAndCrossAttentions):
    """`BaseModelOutputWithPastAndCrossAttentions` with `GatingOutput`'s fields."""


@dataclass
class MoaModelOutput(GatingOutput, BaseModelOutputWithPoolingAndCrossAttentions):
    """`BaseModelOutputWithPoolingAndCrossAttentions` with `GatingOutput`'s fields."""


@dataclass
class MoaMaskedLMOutput(GatingOutput, MaskedLMOutput):
    """`MaskedLMOutput` with `GatingOutput`'s fields."""


@dataclass
class MoaCausalLMOutput(GatingOutput, CausalLMOutputWithCrossAttentions):
    """`CausalLMOutputWithCrossAttentions` with `GatingOutput`'s fields."""


@dataclass
class MoaSequenceClassifierOutput(GatingOutput, SequenceClassifierOutput):
    """`SequenceClassifierOutput` with `GatingOutput`'s fields."""


@dataclass
class MoaSequenceClassifierOutputWithPast(GatingOutput, SequenceClassifierOutputWithPast):
    """`SequenceClassifierOutputWithPast` with `GatingOutput`'s fields."""


@dataclass
class MoaTokenClassifierOutput(GatingOutput, TokenClassifierOutput):
    """`TokenClassifierOutput` with `GatingOutput`'s fields."""


@dataclass
class MoaQuestionAnsweringOutput(GatingOutput, QuestionAnsweringModelOutput):
    """`QuestionAnsweringModelOutput` with `GatingOutput`'s fields."""


@dataclass
class MoaMultipleChoiceOutput(GatingOutput, MultipleChoiceModelOutput):
    """`MultipleChoiceModelOutput` with `GatingOutput`'s fields."""


@dataclass
class MoaSeq2SeqModelOutput(GatingSeq2SeqOutput, Seq2SeqModelOutput):
    """`Seq2SeqModelOutput` with `GatingSeq2SeqOutput`'s fields."""


@dataclass
class MoaSeq2SeqLMOutput(GatingSeq2SeqOutput, Seq2SeqLMOutput):
    """`Seq2SeqLMOutput` with `GatingSeq2SeqOutput`'s fields."""


@dataclass
class MoaSeq2SeqSequenceClassifierOutput(GatingSeq2SeqOutput, Seq2SeqSequenceClassifierOutput):
    """`Seq2SeqSequenceClassifierOutput` with `GatingSeq2SeqOutput`'s fields."""


@dataclass
class MoaSeq2SeqQuestionAnsweringOutput(GatingSeq2SeqOutput, Seq2SeqQuestionAnsweringModelOutput):
    """`Seq2SeqQuestionAnsweringModelOutput` with `GatingSeq2SeqOutput`'s fields."""
