"""What the gates did in one call of a model, in one form for all families.

Attention layers come in three kinds, the `parts` of a model: "encoder" (self-attention that sees the
whole sequence: BERT, and T5's encoder), "decoder" (causal self-attention: GPT-2, and T5's decoder) and
"cross". The tokens of a part are those that it computes queries of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from hf_moa.gated_models import gated_model_of, is_instance_by_name
from hf_moa.modeling.attention.flow import AttentionFlow
from hf_moa.modeling.core.outputs import batch_term
from hf_moa.modeling.core.task_losses import up_to_last_label

if TYPE_CHECKING:
    from hf_moa.gated_models import GatedPreTrainedModel

PARTS = ("encoder", "decoder", "cross")


@dataclass(frozen=True)
class Tokens:
    """Tokens of a call: `ids` `[B, T]` and which are real, `mask` `[B, T]` bool."""

    ids: Tensor
    mask: Tensor


@dataclass(frozen=True)
class Observation:
    """The gates of one call.

    Attributes:
        tokens: "encoder" or "decoder", or both -> tokens of the stack.
        expert_weights: part -> one `[B, E]` or `[B, T, E]` per MAE layer.
        router_logits: part -> one `[B, T, N]` per MoA layer.
        expert_load: part, or "encoder feed_forward", "decoder feed_forward" -> `[layers, N]`, each
            expert's share of the assignments of a router.
        cct_gates: stack -> one dict per layer, as `GatingOutput.cct_gates`.
        compute_fraction: `[B]`, with CCT.
        budget: that the call was made with.
        outputs: all that the model returned.
    """

    tokens: dict[str, Tokens]
    expert_weights: dict[str, tuple[Tensor, ...]] = field(default_factory=dict)
    router_logits: dict[str, tuple[Tensor, ...]] = field(default_factory=dict)
    expert_load: dict[str, Tensor] = field(default_factory=dict)
    cct_gates: dict[str, tuple[dict[str, Tensor], ...]] = field(default_factory=dict)
    compute_fraction: Tensor | None = None
    budget: Any = None
    outputs: Any = None

    def tokens_of(self, part: str) -> Tokens:
        """The tokens of a part's queries."""
        return self.tokens["decoder" if part == "cross" else part]


def part_of(attention: AttentionFlow) -> str:
    """Which of `PARTS` an attention layer belongs to."""
    if attention.is_cross_attention:
        return "cross"
    return "decoder" if attention.is_causal else "encoder"


def attention_layers(model: nn.Module) -> list[AttentionFlow]:
    """All of them, in the order of the layers."""
    # by mark, not by class: a checkpoint may have brought its own
    found = [module for module in model.modules() if "mixture" in module._modules]
    return cast("list[AttentionFlow]", found)


def mixtures_by_part(model: nn.Module, kind: type) -> dict[str, list[nn.Module]]:
    """The mixtures of a kind, in the order of the layers, by the part of their attention."""
    found: dict[str, list[nn.Module]] = {}
    for attention in attention_layers(model):
        # PEFT's `modules_to_save` may have wrapped it
        mixture = next((m for m in attention.mixture.modules() if is_instance_by_name(m, kind)), None)
        if mixture is not None:
            found.setdefault(part_of(attention), []).append(mixture)
    return found


@torch.inference_mode()
def observe(model: nn.Module, batch: Mapping[str, Tensor], *, budget: Any = None) -> Observation:
    """Call a model, in the mode it is in, and keep what its gates did.

    Args:
        batch: arguments of the model, on its device; `input_ids` among them. Labels are left out,
            but for the decoder's inputs of encoder-decoder models without `decoder_input_ids`.
        budget: of CCT; None for the model's default.

    Returns:
        Tokens, gates and compute, by part of the model.
    """
    gated = gated_model_of(model)
    tokens, inputs = _tokens_and_inputs(gated, batch)
    if budget is not None:
        inputs["budget"] = budget
    outputs = model(
        **inputs,
        output_expert_weights=True,
        output_router_logits=True,
        output_cct_gates=True,
        return_dict=True,
    )
    own = None if gated.config.is_encoder_decoder else next(iter(tokens))

    def by_part(name: str, parts: tuple[str, ...]) -> dict[str, Any]:
        fields = {part: name if part == own else f"{part}_{name}" for part in parts}
        found = {part: getattr(outputs, field, None) for part, field in fields.items()}
        return {part: value for part, value in found.items() if value is not None}

    return Observation(
        tokens=tokens,
        expert_weights=by_part("expert_weights", PARTS),
        router_logits=by_part("router_logits", PARTS),
        expert_load=_expert_load(batch_term(outputs, "expert_load") or {}, own),
        cct_gates=by_part("cct_gates", PARTS[:2]),
        compute_fraction=getattr(outputs, "compute_fraction", None),
        budget=budget,
        outputs=outputs,
    )


def _tokens_and_inputs(
    gated: GatedPreTrainedModel, batch: Mapping[str, Tensor]
) -> tuple[dict[str, Tokens], dict[str, Any]]:
    """The tokens of each stack, and what the model is called with."""
    inputs = {name: value for name, value in batch.items() if not name.startswith("label")}
    if inputs.get("input_ids") is None:
        raise ValueError(f"a batch must hold input_ids (got {', '.join(batch) or 'nothing'}).")
    # multiple choice: `[B, choices, T]`
    ids = inputs["input_ids"].flatten(0, -2)
    mask = inputs.get("attention_mask")
    source = Tokens(ids, _all_real(ids) if mask is None else mask.view(ids.shape).bool())
    is_causal = any(part_of(layer) == "decoder" for layer in attention_layers(gated))
    if not gated.config.is_encoder_decoder:
        return {"decoder" if is_causal else "encoder": source}, inputs
    target = _decoder_tokens(gated, batch, source)
    inputs["decoder_input_ids"], inputs["decoder_padding_mask"] = target.ids, target.mask
    return {"encoder": source, "decoder": target}, inputs


def _decoder_tokens(gated: GatedPreTrainedModel, batch: Mapping[str, Tensor], source: Tokens) -> Tokens:
    """What an encoder-decoder model's decoder reads, and which of it the model counts as real."""
    ids = batch.get("decoder_input_ids")
    labels = batch.get("labels") if gated.can_generate() else None
    masks = [batch.get(name) for name in ("decoder_padding_mask", "decoder_attention_mask")]
    mask = next((mask.bool() for mask in masks if mask is not None), None)
    if mask is None and labels is not None:
        mask = up_to_last_label(labels)
    if ids is None and labels is not None:
        ids = _shifted_right(gated, labels)
    elif ids is None and not gated.can_generate() and not type(gated).__name__.endswith("Model"):
        # classifiers give the source to both halves
        ids, mask = _shifted_right(gated, source.ids), source.mask if mask is None else mask
    elif ids is None:
        raise ValueError(
            f"{type(gated).__name__} needs the decoder's side in every batch: labels or "
            f"decoder_input_ids (got {', '.join(batch)})."
        )
    return Tokens(ids, _all_real(ids) if mask is None else mask)


def _shifted_right(gated: GatedPreTrainedModel, ids: Tensor) -> Tensor:
    """What an encoder-decoder model's decoder reads to predict `ids`."""
    return cast("Callable[[Tensor], Tensor]", gated._shift_right)(ids)


def _all_real(ids: Tensor) -> Tensor:
    return torch.ones_like(ids, dtype=torch.bool)


def _expert_load(found: Mapping[str, Tensor], own: str | None) -> dict[str, Tensor]:
    """Loads under the names of `PARTS`; "feed_forward" behind the stack's name."""
    names = {"attention": "", "cross_attention": "cross", "feed_forward": "feed_forward"}
    loads = {}
    for name, load in found.items():
        half, _, rest = name.partition("_") if own is None else (own, "", name)
        part = names[rest] or half
        loads[f"{half} {part}" if part == "feed_forward" else part] = load
    return loads
