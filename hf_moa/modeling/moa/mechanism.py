"""What MoA declares: its configuration fields and their rules (Zhang et al. 2022)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..core.fields import check_choice, check_int, fail
from ..core.mechanism import Mechanism

MOA_EXECUTIONS = ("auto", "sparse", "dense")


@dataclass(kw_only=True, repr=False)
class MoaFields:
    """Configuration fields of MoA, beside `num_attention_heads` (k), `head_dim` and the routers'.

    Args:
        num_attention_experts (`int` or `None`, defaults to `None`):
            N of MoA, at least `num_attention_heads` (k); `None`: 2k.
        moa_execution (`str`, defaults to `"auto"`):
            How the experts' projections are computed: `"sparse"` computes only the chosen experts,
            `"dense"` computes all and selects, by PyTorch's own operators, `"auto"` takes the faster
            one. All compute the same function; only `"dense"` has second derivatives. (Exported graphs,
            and transforms of `torch.func`, are always dense.)
        moa_key_value_heads (`int`, defaults to 1):
            Heads of keys and values, g; also called `num_key_value_heads`. 1 is the paper's. With more,
            the experts stand in g groups, each with a head of its own: of the N/g experts of a group, a
            token uses k/g. It divides k and N, and needs `router_type="topk"`.
    """

    num_attention_experts: int | None = None
    moa_execution: str = "auto"
    moa_key_value_heads: int = 1


def _check_moa(config: Any) -> None:
    check_int(config, "num_attention_experts", minimum=1, optional=True)
    check_choice(config, "moa_execution", MOA_EXECUTIONS)
    check_int(config, "moa_key_value_heads", minimum=1)
    if not MOA.is_on(config):
        return
    heads, experts = config.num_attention_heads, config.attention_experts
    groups = config.moa_key_value_heads
    if experts < heads:
        rule = f"must be at least num_attention_heads={heads}, the heads active per token"
        fail(config, "num_attention_experts", rule)
    if heads % groups or experts % groups:
        rule = f"must divide num_attention_heads={heads} and num_attention_experts={experts}"
        fail(config, "moa_key_value_heads", rule)
    if groups > 1 and config.router_type != "topk":
        rule = f"must be 1 with router_type={config.router_type!r}, whose load is of one group"
        fail(config, "moa_key_value_heads", rule)


MOA = Mechanism(
    name="moa",
    fields=MoaFields,
    prefixes=("moa_", "num_attention_experts"),
    attention_type="moa",
    is_on=lambda config: config.attention_type == "moa",
    check=_check_moa,
    shape_fields=("num_attention_experts", "moa_key_value_heads"),
    has_auxiliary_losses=True,
    code=("moa/mixture.py",),
    package=__package__,
)
