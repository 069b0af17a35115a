"""Model outputs: transformers' own, with the fields of the gates."""

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

from .totals import total

# Fields of the batch, where all others have an entry for each sequence.
_OF_THE_BATCH = (
    "aux_loss",
    "encoder_aux_loss",
    "decoder_aux_loss",
    "aux_losses",
    "expert_load",
    "task_loss",
)


# Fields that a call has without asking for them.
_UNASKED = {
    *_OF_THE_BATCH,
    "budget",
    "compute_fraction",
    "compute_cost",
    "encoder_compute_fraction",
    "decoder_compute_fraction",
}


@dataclass
class _WithBatchTerms(ModelOutput):
    """An output some of whose fields belong to the batch.

    In inference (without gradients and labels) it does not have them: transformers' pipelines split
    every entry of an output by sequence, and beam search repeats each. They are in `batch_terms` then, a
    dict beside the entries.
    """

    def __post_init__(self):
        super().__post_init__()
        self.batch_terms = {}
        if not torch.is_grad_enabled() and getattr(self, "loss", None) is None:
            for name in _OF_THE_BATCH:
                if name in self:
                    self.batch_terms[name] = self[name]
                    OrderedDict.__delitem__(self, name)
                    object.__setattr__(self, name, None)

    def __setattr__(self, name: str, value: Any) -> None:
        """As its parent's, which goes through all fields for each: a good part of a decoding step."""
        if name in self.__dataclass_fields__ and value is not None:
            OrderedDict.__setitem__(self, name, value)
        object.__setattr__(self, name, value)

    def to_tuple(self) -> tuple:
        """As the backbone's, of as many entries; behind them what the call asked of the gates by
        `output_<field>=True`. (Captured hidden states and attentions join an output last.)"""
        names = [field.name for field in dataclasses.fields(self) if field.name in self]
        return tuple(self[name] for name in names if name not in _UNASKED)


def batch_term(outputs: Any, name: str) -> Any:
    """A field of the batch, also of an output of inference; None where there is none."""
    found = getattr(outputs, name, None)
    return getattr(outputs, "batch_terms", {}).get(name) if found is None else found


@dataclass
class GatingOutput(_WithBatchTerms):
    """The fields that gates add to an output. Each is None where it does not apply.

    Attributes:
        aux_loss: scalar, the weighted sum of the auxiliary terms over all layers. In training mode
            `loss` includes it; in eval `loss` is the task's only. Without gradients and labels, this and
            the other fields of the batch are in `batch_terms` instead.
        aux_losses: the unweighted terms by name, each a scalar without gradient, for logging.
        task_loss: scalar, where `loss` includes auxiliary terms: the loss without them.
        expert_load: by the part of the layer that routers serve (`attention`, `cross_attention`,
            `feed_forward`), `[layers, N]`: each expert's share of the assignments, for logging.
        budget: `[B]`, the compute budget of each sequence in this call.
        compute_fraction: `[B]`, share of the gated computation that CCT carried out in this call: 1 at
            every budget as long as gates that `upcycle` made are not trained. (Where a classifier's last
            layer computes one token, of this token, as for the losses and loads of that layer.)
        compute_cost: `[B, 2]`, that computation in multiply-accumulates: carried out, and with all
            gates open.
        router_logits: with `output_router_logits=True`, one `[B, T, N]` per MoA attention.
        expert_weights: with `output_expert_weights=True`, the gate's distribution over experts, one
            `[B, E]` per MAE attention (`[B, T, E]` where causal).
        cct_gates: with `output_cct_gates=True`, one dict per layer: `kv` `[B, S]`, `query` `[B, T]`,
            `ffn` `[B, T, M]` and, with cross-attention, `cross_kv` and `cross_query`.
        cross_router_logits, cross_expert_weights: the same for cross-attention.
        ffn_router_logits: with `output_router_logits=True`, one `[B, T, N]` per feed-forward layer of
            experts; `[B, T, M, N]` where CCT splits it in M parts.
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
    ffn_router_logits: tuple[Tensor, ...] | None = None


@dataclass
class GatingSeq2SeqOutput(_WithBatchTerms):
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
        encoder_ffn_router_logits, decoder_ffn_router_logits: one `[B, T, N]` per feed-forward layer of
            experts; `[B, T, M, N]` where CCT splits it in M parts.
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
    encoder_ffn_router_logits: tuple[Tensor, ...] | None = None
    decoder_ffn_router_logits: tuple[Tensor, ...] | None = None


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
        for name in (
            "compute_fraction",
            "router_logits",
            "ffn_router_logits",
            "expert_weights",
            "cct_gates",
        )
    }
    aux_losses = {
        f"{half}_aux_loss": batch_term(outputs, "aux_loss") for half, outputs in halves.items()
    }
    fields |= aux_losses
    for name in ("cross_router_logits", "cross_expert_weights"):
        fields[name] = decoder.get(name)
    costs = [getattr(outputs, "compute_cost", None) for outputs in halves.values()]
    for name, found in (("aux_loss", aux_losses.values()), ("compute_cost", costs)):
        given = [tensor for tensor in found if tensor is not None]
        fields[name] = total(given) if given else None
    if fields["compute_cost"] is not None:
        used, full = fields["compute_cost"].unbind(dim=-1)
        fields["compute_fraction"] = torch.where(full > 0, used / full.clamp(min=1), 1.0)
    for field in ("aux_losses", "expert_load"):
        fields[field] = {
            f"{half}_{name}": value
            for half, outputs in halves.items()
            for name, value in (batch_term(outputs, field) or {}).items()
        } or None
    all_budgets = [getattr(outputs, "budget", None) for outputs in halves.values()]
    budgets = [budget for budget in all_budgets if budget is not None]
    if len(budgets) == len(halves):
        fields["budget"] = torch.stack([budget.to(budgets[-1]) for budget in budgets], dim=-1)
    return {name: value for name, value in fields.items() if value is not None}


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
