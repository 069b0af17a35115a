"""What a rank has of a linear layer, as a layer of its own, which sends nothing."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..core.linear_slices import PlainLinear, is_hooked
from ..core.sharding import DTensor
from .ranks import TensorRanks


def is_only_split(module: nn.Module) -> bool:
    """Whether ranks share a linear layer that is what its weight says."""
    is_linear = type(module) in (nn.Linear, Conv1D)
    return is_linear and isinstance(module.weight, DTensor) and not is_hooked(module)


def own_outputs(module: Any, ranks: TensorRanks) -> PlainLinear:
    """Of a layer each rank makes some outputs of."""
    bias = module.bias
    if bias is not None:
        is_whole = all(placement.is_replicate() for placement in bias.placements)
        bias = ranks.part(bias.to_local(), 0) if is_whole else bias.to_local()
    return _plain(module, module.weight.to_local(), bias)


def own_inputs(module: Any) -> PlainLinear:
    """Of a layer each rank has some inputs of; without its bias, which is to be added to the sum."""
    return _plain(module, module.weight.to_local(), None)


def _plain(module: PlainLinear, weight: Tensor, bias: Tensor | None) -> PlainLinear:
    plain = type(module).__new__(type(module))
    nn.Module.__init__(plain)
    vars(plain).update(weight=weight, bias=bias)
    return plain
