"""Batch normalisation of gate inputs: masked, safe at batch size 1, exact under checkpointing."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..core.precision import at_least_float32
from ..core.process_sum import in_process_group, sum_over_processes
from ..core.tracing import needs_autograd


class GateBatchNorm(nn.BatchNorm1d):
    """`nn.BatchNorm1d` over the last dimension, whose batch statistics leave padding out.

    It differs from its parent where a gate needs it to:

    - `valid` says which vectors count towards the batch statistics.
    - One valid vector has no variance: then the running statistics normalise, and stay.
    - Frozen (its weight has `requires_grad=False`, as under an adapter) it normalises with the
      running statistics also in training, and keeps them: they belong to the frozen model.
    - Parameters and statistics are created, and computed with, in float32 at least: `from_pretrained`
      in half precision leaves them float32. (`model.half()` casts them like all others.)
    - A forward that gradient checkpointing recomputes during backward does not move the running
      statistics a second time.
    - With `is_global` the batch is that of all processes (as with `nn.SyncBatchNorm`), else each
      process's own.

    Shapes: `x` `[..., d]`, `valid` `[...]` bool or None -> `[..., d]`, float32 at least.
    """

    # here there always are all
    weight: nn.Parameter
    bias: nn.Parameter
    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor
    momentum: float | None  # None: the mean of all batches

    def __init__(self, num_features: int):
        dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
        super().__init__(num_features, dtype=dtype)
        self.is_global = False
        self.copies = 1  # of each vector among the processes, as tensor parallelism makes

    def reset_running_stats(self) -> None:
        """As the parent's. A frozen one keeps its statistics, since it collects no new ones."""
        if self.weight.requires_grad:
            super().reset_running_stats()

    @property
    def uses_batch_statistics(self) -> bool:
        """Whether the next forward does."""
        return self.training and self.weight.requires_grad

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        x = at_least_float32(x)
        weight, bias, mean, var = self._weights_and_statistics(x.dtype)
        if self.uses_batch_statistics:
            return torch.addcmul(bias, self.standardize(x, valid), weight)
        vectors = x.flatten(0, -2)
        return torch.batch_norm(
            vectors, weight, bias, mean, var, False, 0.0, self.eps, torch.backends.cudnn.enabled
        ).view(x.shape)

    def scale_and_shift(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The scale and the shift that the running statistics make, `[d]` each."""
        weight, bias, mean, var = self._weights_and_statistics(dtype)
        scale = weight * torch.rsqrt(var + self.eps)
        return scale, bias - mean * scale

    def _weights_and_statistics(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Weight, bias, running mean and variance."""
        tensors = self.weight, self.bias, self.running_mean, self.running_var
        return tuple(tensor if tensor.dtype == dtype else tensor.to(dtype) for tensor in tensors)

    def standardize(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """`(x - mean) / sqrt(var + eps)` by the batch's statistics, `[..., d]`; the running ones follow
        them."""
        x = at_least_float32(x)
        mean, var = self.running_mean.to(x.dtype), self.running_var.to(x.dtype)
        vectors = x.flatten(0, -2)
        weight = None if valid is None else valid.flatten().unsqueeze(-1).to(x.dtype)
        if self.is_global and in_process_group():
            weight = vectors.new_ones(len(vectors), 1) if weight is None else weight
            center = self.running_mean.to(x.dtype)
            deviation = (vectors - center) * weight
            sums = weight.sum(), deviation.sum(dim=0), deviation.square().sum(dim=0)
            count, batch_mean, batch_var = self._moments_of_all(*sums)
            mean = torch.where(count > 1, batch_mean, mean)
            var = torch.where(count > 1, batch_var, var)
            standard = (vectors - mean) * torch.rsqrt(var + self.eps)
        else:
            compute = _standardize if needs_autograd() else _Standardize.apply
            standard, _, count, batch_mean, batch_var = compute(vectors, weight, mean, var, self.eps)
        self._follow(batch_mean, batch_var, count)
        return standard.view(x.shape)

    def scale_and_shift_of_batch(
        self, count: Tensor, mean: Tensor, var: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The scale and the shift, `[d]` each, that normalise a batch; the running statistics follow it.

        Args:
            count, mean, var: how many vectors of this process count, and their moments.
        """
        if self.is_global and in_process_group():
            away = mean - self.running_mean.to(mean.dtype)
            count, mean, var = self._moments_of_all(count, count * away, count * (var + away.square()))
        weight, bias, running_mean, running_var = self._weights_and_statistics(mean.dtype)
        scale = weight * torch.rsqrt(torch.where(count > 1, var, running_var) + self.eps)
        shift = bias - torch.where(count > 1, mean, running_mean) * scale
        self._follow(mean, var, count)
        return scale, shift

    def _moments_of_all(
        self, count: Tensor, first: Tensor, second: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Count, mean and variance of the vectors of all processes, in one exchange, from sums of this
        one's around the running mean, which all share: squares of it would swallow the rest."""
        sums = torch.cat([count.view(1), first, second])
        count, first, second = sum_over_processes(sums).split([1, len(first), len(second)])
        mean = first / count.clamp(min=1)
        var = (second / count.clamp(min=1) - mean.square()).clamp(min=0)
        return count.squeeze(0) / self.copies, self.running_mean.to(mean.dtype) + mean, var

    def _follow(self, mean: Tensor, var: Tensor, count: Tensor) -> None:
        if not _is_recomputing():
            self._update_running_statistics(mean, var, count, count > 1)

    @torch.no_grad()
    def _update_running_statistics(
        self, mean: Tensor, var: Tensor, count: Tensor, enough: Tensor
    ) -> None:
        # a batch that diverged leaves the statistics as they were
        counts = enough & mean.isfinite().all() & var.isfinite().all()
        momentum: Tensor | float | None = self.momentum
        if momentum is None:
            momentum = 1 / (self.num_batches_tracked + 1)
        momentum = torch.where(counts, momentum, 0.0)
        mean, var = (torch.where(counts, new, 0.0) for new in (mean, var))
        unbiased = var * count / (count - 1).clamp(min=1)
        self.running_mean.lerp_(mean.to(self.running_mean), momentum.to(self.running_mean))
        self.running_var.lerp_(unbiased.to(self.running_var), momentum.to(self.running_var))
        self.num_batches_tracked.add_(counts.to(self.num_batches_tracked.dtype))


def _standardize(
    vectors: Tensor,
    weight: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    eps: float,
    *,
    in_place: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Rows `[n, d]` in standard units and the factor `[d]` that made them so; and the count, mean and
    variance of those that count.

    Args:
        weight: `[n, 1]`, 1 for the vectors that count, and 0; None for all.
        running_mean, running_var: `[d]`, used where no more than one vector counts.
        in_place: use memory again, which no graph holds.
    """
    if weight is None:
        count = vectors.new_full((), len(vectors))
        mean = vectors.mean(dim=0)
    else:
        count = weight.sum()
        mean = (vectors * weight).sum(dim=0) / count.clamp(min=1)
    enough = count > 1
    deviation = vectors - torch.where(enough, mean, running_mean)
    # `var_mean` and `square` take several times as long on the CPU
    squares = deviation * deviation
    if weight is None:
        var = squares.mean(dim=0)
    else:
        var = (squares * weight).sum(dim=0) / count.clamp(min=1)
    scale = torch.rsqrt(torch.where(enough, var, running_var) + eps)
    standard = torch.mul(deviation, scale, out=squares if in_place else None)
    return standard, scale, count, mean, var


class _Standardize(torch.autograd.Function):
    """`_standardize`, of which backward needs only the result."""

    @staticmethod
    def forward(ctx, vectors, weight, running_mean, running_var, eps):
        result = _standardize(vectors, weight, running_mean, running_var, eps, in_place=True)
        standard, scale, count, mean, var = result
        ctx.save_for_backward(standard, scale, weight, count)
        ctx.mark_non_differentiable(count, mean, var)
        return result

    @staticmethod
    def backward(ctx, grad, grad_scale, *_):
        standard, scale, weight, count = ctx.saved_tensors
        share = (count > 1) / count.clamp(min=1)
        # what moves a vector that counts moves the mean and the variance
        of_mean = grad.sum(dim=0) * share
        along = grad * standard
        of_scale = (along.sum(dim=0) + scale * grad_scale) * share
        # a graph holds it, or a transform has no rule for it
        out = None if torch.is_grad_enabled() or needs_autograd(grad) else along
        moved = torch.addcmul(of_mean, standard, of_scale, out=out)
        moved = moved if weight is None else torch.mul(moved, weight, out=out)
        moved = torch.sub(grad, moved, out=out)
        return torch.mul(moved, scale, out=out), None, None, None, None


def _is_recomputing() -> bool:
    """Whether this forward runs inside a backward pass, as a checkpointed layer's second does."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
