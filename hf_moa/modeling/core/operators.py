"""Operators of PyTorch with code of their own. To `torch.compile` they are opaque: it takes them into
its graph whole, with the shapes and the derivatives that are registered for them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch


@torch.compiler.assume_constant_result
def kernels_run_on(device: torch.device) -> bool:
    """Whether kernels in Triton do: `gpu_kernels.runs_on`, a constant to compilers."""
    from .gpu_kernels import runs_on

    return runs_on(device)


def library_name(schemas: Mapping[str, str]) -> str:
    """A name of only these schemas: a checkpoint may carry an older version of this code."""
    return f"hf_moa_{zlib.crc32(repr(schemas).encode()):08x}"


def define(schemas: Mapping[str, str], compute: Callable[..., Any]) -> dict[str, Any]:
    """Make operators known to PyTorch, for CPUs and GPUs: by name, to register more about them. None are
    made, nor returned, where a second copy of this code finds those of the first.

    Args:
        compute: `compute(name, *arguments)`.
    """
    library = library_name(schemas)
    if all(hasattr(getattr(torch.ops, library), name) for name in schemas):
        return {}
    return {
        name: torch.library.custom_op(
            f"{library}::{name}",
            partial(compute, name),
            mutates_args=_changed_by(schema),
            schema=schema,
            device_types=("cpu", "cuda"),
        )
        for name, schema in schemas.items()
    }


def _changed_by(schema: str) -> list[str]:
    """The arguments that an operator changes in place, by its schema."""
    arguments = torch._C.parse_schema(f"operator{schema}").arguments
    return [each.name for each in arguments if each.alias_info is not None and each.alias_info.is_write]
