"""How attention experts start from the heads of a pretrained layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import gcd
from typing import Any

from torch import Tensor

from hf_moa.modeling.core.fields import fail
from hf_moa.pretrained_weights import AttentionWeights, head_size


def default_fields(given: dict[str, Any], source: Any) -> dict[str, Any]:
    """As many heads of keys and values as keep the source's, and its size of heads.

    Args:
        given: the fields that are asked for.
        source: the configuration of the pretrained model.

    Returns:
        An empty dict where no MoA is asked for.
    """
    if given["attention_type"] != "moa":
        return {}
    heads = source.num_attention_heads
    selected = given.get("num_attention_heads", heads)
    experts = given.get("num_attention_experts") or 2 * selected
    fields = {"head_dim": head_size(source)}
    if "num_key_value_heads" not in given and given.get("router_type", "topk") == "topk":
        fields["moa_key_value_heads"] = gcd(heads, selected, experts)
    return fields


def convert_attention(weights: AttentionWeights, config: Any) -> AttentionWeights:
    """The heads of the source stand in as many groups as there are to be heads of keys and values: one
    of these is the mean of a group's, and the experts of a group start from its heads in turn.

    The experts' output projections are k times as large: the weights of the k active ones sum to 1, not
    to k.
    """
    heads, groups = weights.num_heads, config.moa_key_value_heads
    if heads % groups:
        fail(config, "moa_key_value_heads", f"must divide the {heads} heads of the source")
    size = heads // groups
    in_turn = range(config.attention_experts // groups)
    experts = [group * size + i % size for group in range(groups) for i in in_turn]

    def of_experts(tensor: Tensor) -> Tensor:
        """`[h * dh, ...]` -> `[N, dh, ...]`."""
        return tensor.unflatten(0, (heads, -1))[experts]

    def mean(tensor: Tensor) -> Tensor:
        """`[h * dh, ...]` -> `[g * dh, ...]`."""
        return tensor.unflatten(0, (groups, size, -1)).mean(dim=1).flatten(0, 1)

    def of_bias(change: Callable[[Tensor], Tensor], bias: Tensor | None) -> Tensor | None:
        return None if bias is None else change(bias)

    position_bias = weights.position_bias
    return replace(
        weights,
        query=of_experts(weights.query),
        query_bias=of_bias(of_experts, weights.query_bias),
        key=mean(weights.key),
        key_bias=of_bias(mean, weights.key_bias),
        value=mean(weights.value),
        value_bias=of_bias(mean, weights.value_bias),
        output=(of_experts(weights.output) * config.num_attention_heads).contiguous(),
        position_bias=None if position_bias is None else position_bias[:, experts],
    )
