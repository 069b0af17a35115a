"""What sparse MoE declares: its configuration fields and their rules (Shazeer et al. 2017)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..core.fields import check_int, fail
from ..core.mechanism import Mechanism


@dataclass(kw_only=True, repr=False)
class MoeFields:
    """Configuration fields of the MoE feed-forward layer, beside the routers'.

    Args:
        num_ffn_experts (`int`, defaults to 8): feed-forward experts of `ffn_type="moe"`.
        num_ffn_experts_per_token (`int`, defaults to 2): feed-forward experts active for a token.
    """

    num_ffn_experts: int = 8
    num_ffn_experts_per_token: int = 2


def _check_moe(config: Any) -> None:
    check_int(config, "num_ffn_experts", minimum=1)
    check_int(config, "num_ffn_experts_per_token", minimum=1)
    if MOE.is_on(config) and config.num_ffn_experts_per_token > config.num_ffn_experts:
        fail(
            config,
            "num_ffn_experts_per_token",
            f"must be at most num_ffn_experts={config.num_ffn_experts}",
        )


MOE = Mechanism(
    name="moe",
    fields=MoeFields,
    prefixes=("moe_", "num_ffn_experts"),
    ffn_type="moe",
    is_on=lambda config: config.ffn_type == "moe",
    check=_check_moe,
    shape_fields=("num_ffn_experts", "num_ffn_experts_per_token"),
    has_auxiliary_losses=True,
    code=("moe/feed_forward.py",),
    package=__package__,
)
