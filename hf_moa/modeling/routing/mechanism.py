"""What routers declare: the configuration fields that MoA and sparse MoE share (Shazeer et al. 2017)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..core.fields import check_choice, check_number, fail
from ..core.mechanism import Mechanism

ROUTER_TYPES = ("topk", "noisy_topk")
_COEFFICIENTS = (
    "router_balance_loss_coef",
    "router_z_loss_coef",
    "router_importance_loss_coef",
    "router_load_loss_coef",
)


@dataclass(kw_only=True, repr=False)
class RouterFields:
    """Configuration fields of the routers of MoA and of the MoE feed-forward layer.

    Args:
        router_type (`str`, defaults to `"topk"`):
            `"topk"`, or `"noisy_topk"` (Shazeer et al. 2017, eq. 3-5).
        router_balance_loss_coef (`float`, defaults to 0.01): weight of `N * sum_i f_i P_i`.
        router_z_loss_coef (`float`, defaults to 0.001): weight of `mean(logsumexp(logits)^2)`.
        router_importance_loss_coef (`float`, defaults to 0.0): weight of CV^2 of the summed gates.
        router_load_loss_coef (`float`, defaults to 0.0):
            Weight of CV^2 of the smooth expected load; needs `router_type="noisy_topk"`.
        output_router_logits (`bool`, defaults to `False`):
            Return the logits of the routers with every forward pass.
    """

    router_type: str = "topk"
    router_balance_loss_coef: float = 0.01
    router_z_loss_coef: float = 0.001
    router_importance_loss_coef: float = 0.0
    router_load_loss_coef: float = 0.0
    output_router_logits: bool = False


def _check_routers(config: Any) -> None:
    check_choice(config, "router_type", ROUTER_TYPES)
    for name in _COEFFICIENTS:
        check_number(config, name, minimum=0.0)
    if config.router_load_loss_coef > 0 and config.router_type != "noisy_topk":
        rule = "must be 0 unless router_type='noisy_topk': the load is smoothed by the noise"
        fail(config, "router_load_loss_coef", rule)


ROUTER = Mechanism(
    name="router",
    fields=RouterFields,
    prefixes=("router_",),
    is_on=lambda config: config.attention_type == "moa" or config.ffn_type == "moe",
    check=_check_routers,
    shape_fields=("router_type",),
    gate_kind="router",
    gate_name="router",
    gate_words="routers",
    code=("routing/totals.py",),
    package=__package__,
)
