"""How a configuration's nested budgets reach every part of a model."""

from __future__ import annotations

from typing import Any

from ..attention.multi_head import MultiHead
from ..core.slots import GATINGS
from ..parallel.plans import AttentionNames, FeedForwardNames, Plan
from .attention import NestedHeads, refuse_grouped_queries
from .budgets import NestedBudgets, NestedPairs
from .feed_forward import NestedNeurons
from .shapes import shapes_of


@GATINGS.filled_by("nested")
class NestedGating:
    """The budgets of a stack of layers, and what attention and feed-forward layers compute at each."""

    @staticmethod
    def attention(config: Any, mixture: MultiHead, *, num_kv_heads: int, **layer: Any) -> NestedHeads:
        """What an attention layer computes.

        Raises:
            ValueError: a mixture whose heads are no slices of plain projections, or share their keys.
        """
        if not mixture.has_plain_projections:
            raise ValueError(
                f"{type(config).__name__}.nested_budgets must be None with {type(mixture).__name__}, "
                f"whose heads are no slices of plain projections (got {config.nested_budgets})."
            )
        refuse_grouped_queries(mixture.num_heads, num_kv_heads)
        return NestedHeads(min(shape.heads for shape in shapes_of(config)))

    @staticmethod
    def output_dropout(config: Any, rate: float) -> float:
        """Dropout behind the output projection, for a backbone that has `rate` there: the same."""
        return rate

    @staticmethod
    def feed_forward(config: Any, part: Any, **layer: Any) -> None:
        """The backbone's own dense layer is sliced."""

    @staticmethod
    def feed_forward_gate(config: Any, *, intermediate_size: int, **layer: Any) -> NestedNeurons:
        """What that layer computes."""
        return NestedNeurons(intermediate_size)

    # transformers loads no rows that are dealt in turn and then sharded
    split_but_not_sharded = "nested_budgets, whose heads are dealt to the processes in turn"

    @staticmethod
    def attention_plan(config: Any, names: AttentionNames, mixture: type[MultiHead]) -> Plan:
        """Heads are dealt to the ranks in turn, so that each has its share of the first ones."""
        heads = config.num_attention_heads
        plan = {names.layer: "moa_deal", names.output: f"moa_dealt_inputs_{heads}"}
        if not names.fuses:
            plan[names.query] = f"moa_dealt_outputs_{heads}"
        for name, parts in names.keys.items():
            plan[name] = f"moa_dealt_outputs_{heads * (parts + names.fuses)}"
        return plan

    @staticmethod
    def feed_forward_plan(config: Any, names: FeedForwardNames) -> Plan:
        """So are neurons."""
        neurons = config.ffn_size
        plan = dict.fromkeys(names.up, f"moa_dealt_outputs_{neurons}")
        return plan | {names.down: f"moa_dealt_inputs_{neurons}", names.gate: "moa_deal"}

    @staticmethod
    def stack(config: Any) -> NestedBudgets:
        """The budgets of a stack of layers."""
        return NestedBudgets(config.nested_budgets, shapes_of(config), half=config.budget_half)

    @staticmethod
    def pairs(config: Any) -> NestedPairs:
        """The budgets of an encoder and a decoder together."""
        return NestedPairs(config.nested_budgets)
