"""Activation functions by name, in one pass over the tensor where transformers takes several."""

from __future__ import annotations

from torch import nn
from transformers.activations import ACT2FN

# Written out in elementwise operations -> the same function as one kernel. GPT-2's GELU takes
# eight, which are a good part of a decoding step, and keeps four tensors for backward, not one.
_KERNELS = {
    "gelu_accurate": "gelu_pytorch_tanh",
    "gelu_new": "gelu_pytorch_tanh",
    "gelu_python": "gelu",
}


def build_activation(name: str) -> nn.Module:
    """The activation that transformers has under this name, equal to it up to rounding.

    Raises:
        KeyError: transformers has none of this name.
    """
    return ACT2FN[_KERNELS.get(name, name)]
