"""What MAE declares: its configuration fields and their rules (Peng et al. 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from math import comb
from typing import Any

from ..core.fields import check_choice, check_int, check_number, fail
from ..core.mechanism import Mechanism

MAE_GATE_TYPES = ("learned", "uniform")
MOST_MAE_EXPERTS = 65_536  # of a layer: each is an output of the gate


@dataclass(kw_only=True, repr=False)
class MaeFields:
    """Configuration fields of MAE.

    Args:
        mae_num_dropped_heads (`int`, defaults to 1):
            Heads that each MAE expert leaves out: t of Peng et al. 2020. For 8 heads, 1 is "MAE-7"
            with 8 experts and 2 is "MAE-6" with 28.
        mae_gate_type (`str`, defaults to `"learned"`):
            `"learned"`, or `"uniform"` for UNI-MAE, which has no gate parameters.
        mae_gate_hidden_size (`int`, defaults to 256): width of the gate's hidden layer.
        mae_gate_dropout (`float`, defaults to 0.1): dropout on the gate's hidden layer.
        mae_gate_window (`int` or `None`, defaults to 100):
            Causal layers: the gate at a position averages the inputs of this many positions up to it
            (`None`: all), padding left out: in the middle of a sequence, it leaves fewer to average.
        output_expert_weights (`bool`, defaults to `False`):
            Return the gates' distributions over experts with every forward pass.
    """

    mae_num_dropped_heads: int = 1
    mae_gate_type: str = "learned"
    mae_gate_hidden_size: int = 256
    mae_gate_dropout: float = 0.1
    mae_gate_window: int | None = 100
    output_expert_weights: bool = False


def _check_mae(config: Any) -> None:
    check_choice(config, "mae_gate_type", MAE_GATE_TYPES)
    check_int(config, "mae_num_dropped_heads", minimum=1)
    check_int(config, "mae_gate_hidden_size", minimum=1)
    check_int(config, "mae_gate_window", minimum=1, optional=True)
    check_number(config, "mae_gate_dropout", minimum=0.0, below=1.0)
    heads = config.num_attention_heads
    if not MAE.is_on(config):
        return
    if config.mae_num_dropped_heads >= heads:
        rule = f"must be below num_attention_heads={heads}, so that an expert keeps a head"
        fail(config, "mae_num_dropped_heads", rule)
    experts = comb(heads, config.mae_num_dropped_heads)
    if experts > MOST_MAE_EXPERTS:
        fail(
            config,
            "mae_num_dropped_heads",
            f"must give at most {MOST_MAE_EXPERTS:,} experts, one for each choice of so many of "
            f"num_attention_heads={heads} heads: these are {experts:,}",
        )


def _unused_mae_fields(config: Any) -> dict[str, str]:
    if config.mae_gate_type == "learned":
        return {}
    names = ("mae_gate_hidden_size", "mae_gate_dropout", "mae_gate_window")
    return dict.fromkeys(names, "mae_gate_type='uniform' has no gates")


MAE = Mechanism(
    name="mae",
    fields=MaeFields,
    prefixes=("mae_",),
    attention_type="mae",
    is_on=lambda config: config.attention_type == "mae",
    check=_check_mae,
    unused=_unused_mae_fields,
    shape_fields=("mae_num_dropped_heads", "mae_gate_type", "mae_gate_hidden_size"),
    gate_kind="mae",
    gate_name="gate",
    gate_words="MAE gates",
    code=("mae/mixture.py", "mae/totals.py"),
    package=__package__,
)
