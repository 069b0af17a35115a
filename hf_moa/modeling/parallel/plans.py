"""Which style of tensor and expert parallelism each module of a gated backbone has.

A backbone names its modules (`ParallelNames`); what fills its slots says how they are split: the mixture
its projections (`MultiHead.tensor_plan`), the gating its own modules and the feed-forward layer. In the
plans of transformers' engine a `*` stands for the number of a layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..core.slots import FEED_FORWARDS, GATINGS, MIXTURES
from .styles import HAS_STYLES, register_styles

Plan = dict[str, str]


@dataclass(frozen=True)
class Projections:
    """How a backbone's linear layers are split.

    Args:
        are_transposed: they are `Conv1D`, and not `nn.Linear`.
    """

    are_transposed: bool = False

    def outputs(self, parts: int = 1) -> str:
        """Of a layer whose outputs are split, in each of `parts` matrices side by side (of `Conv1D`)."""
        return f"moa_outputs_{parts}" if self.are_transposed else "colwise"

    @property
    def inputs(self) -> str:
        """Of one whose inputs are."""
        return "moa_inputs" if self.are_transposed else "rowwise"


@dataclass(frozen=True)
class AttentionNames:
    """Modules of an attention layer.

    Args:
        layer: the `AttentionFlow`.
        query: its projection.
        keys: those of keys and values, with the number of matrices side by side in each.
        output: the output projection.
        kind: how they are split.
        fuses: queries of plain heads are the first matrix in that of the keys and values.
    """

    layer: str
    query: str
    keys: dict[str, int]
    output: str
    kind: Projections = Projections()
    fuses: bool = False


@dataclass(frozen=True)
class FeedForwardNames:
    """Modules of a feed-forward layer.

    Args:
        layer: the layer, where it is one of `build_feed_forward`.
        up, down: matrices of the backbone's own dense layer.
        gate: the gate of its hidden activation.
        kind: how they are split.
    """

    layer: str
    up: tuple[str, ...]
    down: str
    gate: str
    kind: Projections = Projections()

    @property
    def dense(self) -> Plan:
        """Each rank has some of the neurons."""
        return {**dict.fromkeys(self.up, self.kind.outputs()), self.down: self.kind.inputs}


@dataclass(frozen=True)
class ParallelNames:
    """Modules of a base model: its layers, `embeddings` of the vocabulary, and those in its layers."""

    layers: str
    embeddings: tuple[str, ...]
    attention: tuple[AttentionNames, ...]
    feed_forward: tuple[FeedForwardNames, ...]


def tensor_plan(config: Any, names: ParallelNames, mixture: Any) -> Plan | None:
    """The plan of tensor parallelism; None where transformers or torch has no such engine.

    Args:
        config: a `GatingConfig`.
        names: of the backbone; there may be names in the plan that a model has not.
        mixture: the class of mixtures that stands where no mechanism fills the slot.
    """
    if not HAS_STYLES:
        return None
    mixture, gating = MIXTURES.of(config) or mixture, GATINGS.of(config)
    plan = dict.fromkeys(names.embeddings, "embedding_rowwise")
    for attention in names.attention:
        plan |= mixture.tensor_plan(config, attention) | {attention.layer: "moa_spread"}
        if gating is not None:
            plan |= gating.attention_plan(config, attention, mixture)
    for layer in names.feed_forward:
        if gating is not None:
            plan |= gating.feed_forward_plan(config, layer)
        elif FEED_FORWARDS.of(config) is None:
            plan |= layer.dense
    register_styles(plan.values())
    return plan


def expert_plan(config: Any, names: ParallelNames) -> Plan | None:
    """The plan of expert parallelism: each rank has some of the feed-forward experts. None where there
    are no experts."""
    experts = FEED_FORWARDS.of(config)
    if not HAS_STYLES or experts is None:
        return None
    plan: Plan = {}
    for layer in names.feed_forward:
        plan |= experts.expert_plan(layer.layer)
        plan |= experts.expert_plan(f"{layer.layer}.parts.*")
    return plan
