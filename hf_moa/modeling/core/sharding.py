"""FSDP version 2's classes; where torch has no distributed training, classes of which nothing is."""

from __future__ import annotations

try:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor
except ImportError:

    class FSDPModule:  # type: ignore[no-redef]  # in place of PyTorch's
        """A model that is sharded."""

    class DTensor:  # type: ignore[no-redef]  # the same
        """A tensor that is sharded."""


__all__ = ["DTensor", "FSDPModule"]
