"""Parts of a backbone's matrices: some of the outputs of a linear layer, or some of its inputs."""

from __future__ import annotations

from typing import TypeGuard

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

# linear layers whose weight can say all that they do
PlainLinear = nn.Linear | Conv1D


def is_plain(module: nn.Module) -> TypeGuard[PlainLinear]:
    """Whether a linear layer is what its weight says: no adapter, quantisation, hook or offloading."""
    if type(module) not in (nn.Linear, Conv1D) or type(module.weight) not in (nn.Parameter, Tensor):
        return False
    return not is_watched(module)


def is_watched(module: nn.Module) -> bool:
    """Whether something waits for calls of a module: a hook, offloading, a wrapped forward."""
    return "forward" in module.__dict__ or is_hooked(module)


def is_hooked(module: nn.Module) -> bool:
    """Whether a module has hooks."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def takes_subsets(module: nn.Module) -> bool:
    """Whether a layer may be handed some of a batch's tokens as `[1, n, d]`. Adapters want the batch:
    they may treat its sequences differently. (FTG's are copies of what they adapt.)"""
    # `hasattr` takes long to say no
    return "base_layer" not in module._modules or hasattr(module, "ftg_modules")


def linear_slice(module: nn.Module, x: Tensor, first: int, last: int, *, of: int) -> Tensor:
    """The outputs of `module` from part `first` to before part `last`, if it had `of` parts.

    `[..., in]` -> `[..., (last - first) / of * out]`. Of a layer that is not plain, all is computed.
    """
    if not is_plain(module):
        y = module(x)
        size = y.shape[-1] // of
        return y[..., first * size : last * size]
    size = module.weight.shape[1 if isinstance(module, Conv1D) else 0] // of
    return output_slice(module, x, first * size, last * size)


def output_slice(module: nn.Module, x: Tensor, start: int, end: int) -> Tensor:
    """The outputs of a linear layer from `start` to before `end`: `[..., in]` -> `[..., end - start]`.
    Of a layer that is not plain, all is computed, if it has no `output_slice` of its own."""
    own = module.__dict__.get("output_slice")
    if own is not None:
        return own(x, start, end)
    if not is_plain(module):
        return module(x)[..., start:end]
    return plain_output_slice(module, x, start, end)


def plain_output_slice(module: PlainLinear, x: Tensor, start: int, end: int) -> Tensor:
    """The same of a layer that is what its weight says."""
    bias = None if module.bias is None else module.bias[start:end]
    is_conv = isinstance(module, Conv1D)
    weight = module.weight[:, start:end].t() if is_conv else module.weight[start:end]
    return nn.functional.linear(x, weight, bias)


def of_first_inputs(module: nn.Module, x: Tensor, size: int) -> Tensor:
    """What a linear layer of `size` inputs makes of its first ones, the others being zero: `[..., n]` ->
    `[..., out]`. In a layer that is not plain, they are."""
    if x.shape[-1] == size or "takes_first_inputs" in module.__dict__:
        return module(x)
    if not is_plain(module):
        return module(nn.functional.pad(x, (0, size - x.shape[-1])))
    return plain_of_first_inputs(module, x)


def plain_of_first_inputs(module: PlainLinear, x: Tensor) -> Tensor:
    """The same of a layer that is what its weight says."""
    is_conv, first = isinstance(module, Conv1D), slice(x.shape[-1])
    weight = module.weight[first].t() if is_conv else module.weight[:, first]
    return nn.functional.linear(x, weight, module.bias)


def input_slice(
    module: PlainLinear,
    x: Tensor,
    first: int,
    last: int,
    *,
    of: int,
    bias: Tensor | None = None,
) -> Tensor:
    """What the inputs from part `first` to before part `last`, of `of`, add to the output of a plain
    `module`, its own bias aside: `[..., (last - first) / of * in]` -> `[..., out]`."""
    size = x.shape[-1] // (last - first)
    part = slice(first * size, last * size)
    weight = module.weight[part].t() if isinstance(module, Conv1D) else module.weight[:, part]
    return nn.functional.linear(x, weight, bias)
