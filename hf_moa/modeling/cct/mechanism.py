"""What CCT declares: its configuration fields and their rules (Bapna et al. 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..core.fields import check_bool, check_choice, check_int, check_number, fail
from ..core.mechanism import Mechanism

CCT_EXECUTIONS = ("auto", "sparse", "dense")


@dataclass(kw_only=True, repr=False)
class CctFields:
    """Configuration fields of CCT.

    Args:
        cct_budgets (`list[float]` or `None`, defaults to `None`):
            Compute budgets in (0, 1] that training samples from, repeats being sampling weights
            (Bapna et al. 2020 use `[1, 1, 1, .5, .33, .2]`). `None` switches CCT off.
        cct_num_ffn_splits (`int`, defaults to 4): parts of the feed-forward layer, each with a gate.
        cct_gate_hidden_size (`int`, defaults to 128): width of the control networks' hidden layer.
        cct_noise_max (`float`, defaults to 5.0):
            Final scale of the noise on the gates' logits. 5 is the paper's; gates of a pretrained model
            start open, and want about 1.
        cct_budget_loss_coef (`float`, defaults to 1.0): weight of the budget loss.
        cct_sublayer_norm (`bool`, defaults to `True`):
            The paper's extra LayerNorms inside the sub-layers. `False` leaves them out, so that a
            converted pretrained checkpoint starts as the same function.
        cct_execution (`str`, defaults to `"auto"`):
            How hard gates are executed in eval: `"dense"` computes all and multiplies by the gates,
            `"sparse"` computes only the tokens with open gates, `"auto"` takes the faster one, as
            measured on a CPU (on an accelerator: dense). All compute the same function, except for the
            attention probabilities of skipped queries, which sparse execution does not compute. A cache
            holds only the keys and values of open gates: with `"sparse"` always, with `"auto"` where
            that is faster: from a million numbers in a layer's keys on, for one sequence from about
            d=384 on.
        output_cct_gates (`bool`, defaults to `False`): Return the gates with every forward pass.
    """

    cct_budgets: list | None = None
    cct_num_ffn_splits: int = 4
    cct_gate_hidden_size: int = 128
    cct_noise_max: float = 5.0
    cct_budget_loss_coef: float = 1.0
    cct_sublayer_norm: bool = True
    cct_execution: str = "auto"
    output_cct_gates: bool = False


def is_budget(value: Any) -> bool:
    """Whether `value` is a compute budget: a number in (0, 1]."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < float(value) <= 1


def _check_cct(config: Any) -> None:
    check_choice(config, "cct_execution", CCT_EXECUTIONS)
    check_int(config, "cct_num_ffn_splits", minimum=1)
    check_int(config, "cct_gate_hidden_size", minimum=1)
    check_number(config, "cct_noise_max", minimum=0.0)
    check_number(config, "cct_budget_loss_coef", minimum=0.0)
    check_bool(config, "cct_sublayer_norm")
    if CCT.is_on(config):
        config.validate_budgets()
        if config.ffn_size % config.cct_num_ffn_splits != 0:
            fail(config, "cct_num_ffn_splits", f"must divide the feed-forward size {config.ffn_size}")


CCT = Mechanism(
    name="cct",
    fields=CctFields,
    prefixes=("cct_",),
    is_on=lambda config: config.cct_budgets is not None,
    check=_check_cct,
    shape_fields=("cct_num_ffn_splits", "cct_gate_hidden_size"),
    gate_kind="cct",
    gate_name="control",
    gate_words="CCT control networks",
    gate_modules=("control_symbols",),
    has_auxiliary_losses=True,
    code=("cct/gating.py", "cct/costs.py"),
    package=__package__,
)
