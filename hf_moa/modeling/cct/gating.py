"""How a configuration's CCT fields become gates in every part of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ..attention.multi_head import MultiHead
from ..core.budgets import BudgetList, PairedBudgets
from ..core.slots import GATINGS
from ..parallel.plans import AttentionNames, FeedForwardNames, Plan, Projections
from .attention import AttentionGates
from .budgets import BudgetControl
from .feed_forward import FeedForwardGate, GatedFeedForward

Norm = Callable[[int], nn.Module]


@GATINGS.filled_by("cct")
class CctGating:
    """What gates the tokens of attention and feed-forward layers; the budgets of a stack of layers."""

    @staticmethod
    def attention(
        config: Any,
        mixture: MultiHead,
        *,
        hidden_size: int,
        num_kv_heads: int,
        norm: Norm,
        output_dropout: float,
        is_cross_attention: bool,
        is_causal: bool,
    ) -> AttentionGates:
        """The gates of an attention layer; `output_dropout` is the backbone's behind its projection."""
        return AttentionGates(
            hidden_size=hidden_size,
            num_heads=mixture.num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=mixture.head_dim,
            joint_context=mixture.has_joint_context,
            norm=_sublayer_norm(config, norm),
            context_dropout=output_dropout - CctGating.output_dropout(config, output_dropout),
            is_cross_attention=is_cross_attention,
            is_causal=is_causal,
            **_network_options(config),
        )

    @staticmethod
    def output_dropout(config: Any, rate: float) -> float:
        """Dropout behind the output projection, for a backbone that has `rate` there: in the paper's
        layout it is in front."""
        return 0.0 if config.cct_sublayer_norm else rate

    @staticmethod
    def feed_forward(
        config: Any,
        part: Callable[[int], nn.Module],
        *,
        hidden_size: int,
        intermediate_size: int,
        is_gated: bool,
        norm: Norm,
    ) -> GatedFeedForward | None:
        """A layer of parts, which `part` makes of a width; None where gates on the hidden activation of
        the backbone's own dense layer are all that is asked for."""
        if config.ffn_type == "dense" and not config.cct_sublayer_norm:
            return None
        num_parts = config.cct_num_ffn_splits
        parts = [part(intermediate_size // num_parts) for _ in range(num_parts)]
        gate = CctGating.feed_forward_gate(
            config, hidden_size=hidden_size, intermediate_size=intermediate_size, is_gated=is_gated
        )
        norm = _sublayer_norm(config, norm)
        return GatedFeedForward(parts, gate, hidden_size=hidden_size, norm=norm)

    @staticmethod
    def feed_forward_gate(
        config: Any, *, hidden_size: int, intermediate_size: int, is_gated: bool
    ) -> FeedForwardGate:
        """The gates of a feed-forward layer's parts."""
        active = config.num_ffn_experts_per_token if config.ffn_type == "moe" else 1
        matrices = 3 if is_gated else 2
        num_splits = config.cct_num_ffn_splits
        return FeedForwardGate(
            hidden_size=hidden_size,
            num_splits=num_splits,
            part_cost=matrices * hidden_size * active * (intermediate_size // num_splits),
            **_network_options(config),
        )

    # what tensor parallelism splits so that FSDP cannot shard it
    split_but_not_sharded = None

    @staticmethod
    def attention_plan(config: Any, names: AttentionNames, mixture: type[MultiHead]) -> Plan:
        """How the norms are split, which normalise all heads' keys, values or contexts together."""
        plan, norm = {}, f"{names.layer}.cct.{{}}_norm".format
        if not mixture.splits_keys(config):  # every rank has all keys, and uses them in part
            plan = dict.fromkeys(names.keys, "replicate")
            plan |= {norm("key"): "moa_shared_output", norm("value"): "moa_shared_output"}
        elif config.cct_sublayer_norm:
            plan = {norm("key"): "moa_whole_norm", norm("value"): "moa_whole_norm"}
        if config.cct_sublayer_norm:
            is_joint = mixture.has_joint_context
            plan[norm("context")] = "moa_whole_norm" if is_joint else "moa_shared_parameters"
        return plan

    @staticmethod
    def feed_forward_plan(config: Any, names: FeedForwardNames) -> Plan:
        """Each rank has some of the neurons: of the M slices one after the other, of the M networks some
        of each."""
        if config.ffn_type != "dense":
            return {}
        if not config.cct_sublayer_norm:
            return names.dense | {names.gate: "moa_spread"}
        part, kind = f"{names.layer}.parts.*", Projections()
        ups = (f"{part}.up", f"{part}.linear")
        return {**dict.fromkeys(ups, kind.outputs()), f"{part}.down": kind.inputs}

    @staticmethod
    def stack(config: Any) -> BudgetControl:
        """The budgets of a stack of layers."""
        return BudgetControl(
            config.stack_budgets,
            default=config.default_stack_budget,
            half=config.budget_half,
            hidden_size=config.embedding_width,
            symbols_start_at_zero=not config.cct_sublayer_norm,
            has_symbols=config.cct_control_symbols,
            full_is_plain=config.cct_full_budget_is_plain,
        )

    @staticmethod
    def pairs(config: Any) -> PairedBudgets:
        """The budgets of an encoder and a decoder together."""
        return PairedBudgets(config.budget_pairs, field="cct_budgets")


def _network_options(config: Any) -> dict[str, Any]:
    """What all of a stack's gates have in common."""
    num_budgets = len(BudgetList(config.stack_budgets, field="cct_budgets").distinct)
    return {
        "gate_hidden_size": config.cct_gate_hidden_size,
        "starts_open": not config.cct_sublayer_norm,
        "num_budgets": num_budgets if config.cct_budget_bias else 0,
        "is_hard": config.cct_gate_training == "hard",
        "execution": config.cct_execution,
    }


def _sublayer_norm(config: Any, norm: Norm) -> Norm:
    """The paper's extra LayerNorms, made by `norm`; or nothing instead of them, where
    `cct_sublayer_norm` leaves them out."""
    return norm if config.cct_sublayer_norm else lambda size: nn.Identity()
