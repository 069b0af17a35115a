"""FSDP version 2's classes; where torch has no distributed training, classes of which nothing is."""

from __future__ import annotations

from typing import Any

from torch import nn

try:
    from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
    from torch.distributed.tensor import DTensor
except ImportError:

    class FSDPModule:  # type: ignore[no-redef]  # in place of PyTorch's
        """A model that is sharded."""

    class DTensor:  # type: ignore[no-redef]  # the same
        """A tensor that is sharded."""

    def register_fsdp_forward_method(module, method_name) -> None:  # type: ignore[misc]  # the same
        """Let a method see the whole of a sharded model."""


def mesh_of(parameter: nn.Parameter) -> Any:
    """The mesh of processes that a parameter is spread over; None where each has all of it."""
    return parameter.device_mesh if isinstance(parameter, DTensor) else None


__all__ = ["DTensor", "FSDPModule", "mesh_of", "register_fsdp_forward_method"]
