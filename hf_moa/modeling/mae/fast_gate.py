"""MAE's causal gate on a GPU in half precision: two operators of PyTorch instead of a dozen.

The plain form is `MaeGate.forward` of `windowed_mean`. What comes before tanh is affine, except for the
statistics of a batch, so it commutes with means: here the norm goes into the first matrix, and features
are averaged, which are narrower than inputs. `fast_gate_gpu.py` averages them and makes gates of them in
one kernel. In training another sums up the moments of the inputs' means, which are written nowhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from ..cache.gate_states import GatePast
from ..core.linear_slices import is_plain, is_watched
from ..core.operators import define, kernels_run_on, library_name
from ..core.precision import compute_dtype, without_autocast
from ..core.tracing import is_drawn_as_graph, is_traced, is_transformed
from .gate import MaeGate
from .norm import GateBatchNorm

# What the kernels take: wider windows are long sums, and more experts or features than that do not fit.
_WIDEST_WINDOW = 512
_MOST_EXPERTS = 128
_HIDDEN_SIZES = (16, 32, 64, 128, 256)


def is_fast(gate: nn.Module, x: Tensor, window: int, past: GatePast | None) -> bool:
    """Whether `fast_gates` can compute a gate's distributions for `x` `[B, T, d]`."""
    if not x.is_cuda or type(gate) is not MaeGate:  # one of these may be an adapter's
        return False
    norm, dense, out = gate.norm, gate.dense, gate.out
    if not is_plain(dense) or not is_plain(out) or is_watched(gate.dropout) or is_watched(gate):
        return False
    if type(norm) is not GateBatchNorm or is_watched(norm):
        return False
    if type(norm.weight) not in (nn.Parameter, Tensor) or type(gate.dropout) is not nn.Dropout:
        return False
    return (
        compute_dtype(dense.weight) in (torch.float16, torch.bfloat16)
        and window <= _WIDEST_WINDOW
        and out.out_features <= _MOST_EXPERTS
        and dense.out_features in _HIDDEN_SIZES
        and x.shape[-1] % 16 == 0
        and (past is None or not (gate.training or torch.is_grad_enabled()))
        and not (is_drawn_as_graph() or is_transformed(x))
        and kernels_run_on(x.device)
    )


def fast_gates(
    gate: MaeGate, x: Tensor, valid: Tensor | None, *, window: int, past: GatePast | None
) -> Tensor:
    """A gate's distribution over experts at each position.

    Args:
        x: `[B, T, d]`, the attention layer's inputs.
        valid: `[B, T]` bool, the real tokens; None for all.
        window: inputs that the gate averages.
        past: what it finds in a cache, in eval.

    Returns:
        `[B, T, E]`, float32.
    """
    dtype = compute_dtype(gate.dense.weight)
    with without_autocast(x.device.type):
        x = x.to(dtype)
        length = x.shape[1]

        def first_layer() -> tuple[Tensor, Tensor]:
            """`dense(norm(x))` as one matrix and bias."""
            scale, shift = _scale_and_shift(gate.norm, x, valid, window)
            weight = gate.dense.weight.to(scale.dtype)
            return (weight * scale).to(dtype), (gate.dense.bias + weight @ shift).to(dtype)

        if past is None or is_traced(x):
            weight, bias = first_layer()
        else:
            weight, bias = past.once((gate.norm.weight, gate.dense.weight, dtype), first_layer)
        features = nn.functional.linear(x, weight, bias)
        if past is not None:
            features, valid = past.window(features, valid)
        dropout = gate.dropout.p if gate.dropout.training else 0.0
        kept = torch.rand_like(features, dtype=torch.float) >= dropout if dropout else None
        weights = gate.out.weight.to(dtype), gate.out.bias.to(dtype)
        needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (features, *weights))
        gates, _, _ = operators().window_gates(
            features, valid, kept, *weights, length, window, dropout, needs_grad
        )
        return gates


def _scale_and_shift(
    norm: GateBatchNorm, x: Tensor, valid: Tensor | None, window: int
) -> tuple[Tensor, Tensor]:
    if not norm.uses_batch_statistics:
        return norm.scale_and_shift(torch.promote_types(x.dtype, torch.float32))
    averages, squares, numbers = operators().window_moments(x, valid, window)
    share = numbers.unsqueeze(-1)
    count = numbers.sum()
    mean = (share * averages).sum(dim=0) / count.clamp(min=1)
    squares = squares + share * (averages - mean).square()
    return norm.scale_and_shift_of_batch(count, mean, squares.sum(dim=0) / count.clamp(min=1))


def operators() -> Any:
    """PyTorch's names for the operators below."""
    return getattr(torch.ops, _LIBRARY)


def _computed_by(x: Tensor) -> dict[str, Callable[..., Any]]:
    from .fast_gate_gpu import OPERATORS

    return OPERATORS


def _compute(name: str, x: Tensor, *args: Any) -> Any:
    # a backward may run with autocast on, which sums in float32
    with without_autocast(x.device.type):
        return _computed_by(x)[name](x, *args)


# those of the functions in `fast_gate_gpu.py`, whose import takes Triton's
_SCHEMAS = {
    "window_gates": "(Tensor features, Tensor? valid, Tensor? kept, Tensor weight, Tensor bias, "
    "SymInt length, SymInt window, float dropout, bool for_backward) -> (Tensor, Tensor, Tensor)",
    "window_gates_backward": "(Tensor grad, Tensor gates, Tensor active, Tensor counts, Tensor? valid, "
    "Tensor? kept, Tensor weight, SymInt window, float dropout) -> (Tensor, Tensor, Tensor)",
    "window_moments": "(Tensor x, Tensor? valid, SymInt window) -> (Tensor, Tensor, Tensor)",
    "window_moments_backward": "(Tensor grad_averages, Tensor grad_squares, Tensor x, Tensor? valid, "
    "Tensor averages, Tensor numbers, SymInt window) -> Tensor",
}
_LIBRARY = library_name(_SCHEMAS)


def _register() -> None:
    defined = define(_SCHEMAS, _compute)
    if defined:
        _register_shapes(defined)
        _register_gradients(defined)
        _register_flops()


def _register_shapes(defined: dict[str, Any]) -> None:
    @defined["window_gates"].register_fake
    def _(features, valid, kept, weight, bias, length, window, dropout, for_backward):
        batch, _, hidden = features.shape
        gates = features.new_empty(batch, length, weight.shape[0], dtype=torch.float32)
        active = features.new_empty((batch, length, hidden) if for_backward else 0)
        return gates, active, gates.new_empty((batch, length) if for_backward else 0)

    @defined["window_gates_backward"].register_fake
    def _(grad, gates, active, counts, valid, kept, weight, window, dropout):
        bias = weight.new_empty(weight.shape[0])
        return torch.empty_like(active), weight.new_empty(weight.shape), bias

    @defined["window_moments"].register_fake
    def _(x, valid, window):
        averages = x.new_empty(x.shape[0], x.shape[2], dtype=torch.float32)
        return averages, torch.empty_like(averages), averages.new_empty(x.shape[0])

    @defined["window_moments_backward"].register_fake
    def _(grad_averages, grad_squares, x, valid, averages, numbers, window):
        return x.new_empty(x.shape)


def _register_gradients(defined: dict[str, Any]) -> None:
    def save_gates(ctx, inputs, output):
        _, valid, kept, weight, _, _, ctx.window, ctx.dropout, _ = inputs
        ctx.save_for_backward(*output, valid, kept, weight)
        ctx.mark_non_differentiable(*output[1:])

    def gates_backward(ctx, grad, *_):
        gates, active, counts, valid, kept, weight = ctx.saved_tensors
        grad_features, grad_weight, grad_bias = operators().window_gates_backward(
            grad, gates, active, counts, valid, kept, weight, ctx.window, ctx.dropout
        )
        return grad_features, None, None, grad_weight, grad_bias, None, None, None, None

    def save_moments(ctx, inputs, output):
        x, valid, ctx.window = inputs
        averages, _, numbers = output
        ctx.save_for_backward(x, valid, averages, numbers)
        ctx.mark_non_differentiable(numbers)

    def moments_backward(ctx, grad_averages, grad_squares, _):
        x, valid, averages, numbers = ctx.saved_tensors
        grad = operators().window_moments_backward(
            grad_averages, grad_squares, x, valid, averages, numbers, ctx.window
        )
        return grad, None, None

    defined["window_gates"].register_autograd(gates_backward, setup_context=save_gates)
    defined["window_moments"].register_autograd(moments_backward, setup_context=save_moments)


def _register_flops() -> None:
    """Tell `torch.utils.flop_counter` what the operators multiply."""

    @register_flop_formula(operators().window_gates)
    def _(features, valid, kept, weight, bias, length, *args, **kwargs) -> int:
        return 2 * features[0] * length * weight[0] * weight[1]

    @register_flop_formula(operators().window_gates_backward)
    def _(grad, gates, active, counts, valid, kept, weight, *args, **kwargs) -> int:
        return 4 * active[0] * active[1] * weight[0] * weight[1]


_register()
