"""Whether a forward runs under a transform, or is traced, and must not look at its numbers."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.utils.import_utils import is_torchdynamo_exporting


def is_traced(x: Tensor) -> bool:
    """Whether `x` stands for numbers that are not there yet: transformers' `is_tracing`, and for any
    subclass of tensors; in a twentieth of its time, which a layer feels."""
    if type(x) is not Tensor or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return True
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def is_drawn_as_graph() -> bool:
    """Whether a graph is made that has to hold only common operators, as in ONNX."""
    return is_torchdynamo_exporting() or torch.jit.is_tracing()


def is_transformed(*tensors: Tensor) -> bool:
    """Whether a transform of `torch.func` or forward-mode differentiation is at work, or autograd has
    batched gradients among the tensors (`is_grads_batched`): hand-written gradients have no formula."""
    if _is_any_transform_at_work():
        return True
    return not torch.compiler.is_compiling() and any(
        map(torch._C._functorch.is_legacy_batchedtensor, tensors)
    )


def needs_autograd(*tensors: Tensor) -> bool:
    """Whether autograd's derivative has to be taken instead of one written by hand: in a transform,
    and in compiled graphs, where the compiler fuses operators and chooses what is kept for backward."""
    return torch.compiler.is_compiling() or is_transformed(*tensors)


@torch.compiler.assume_constant_result  # Dynamo finds a stack in every function that it traces
def _is_any_transform_at_work() -> bool:
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
    )
