"""Batch normalisation of gate inputs: masked, safe at batch size 1, exact under checkpointing."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .precision import at_least_float32
from .process_sum import has_several_processes, sum_over_processes


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

    def __init__(self, num_features: int):
        dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
        super().__init__(num_features, dtype=dtype)
        self.is_global = False

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        x = at_least_float32(x)
        mean, var = self.running_mean.to(x.dtype), self.running_var.to(x.dtype)
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        if not (self.training and self.weight.requires_grad):
            rows = x.flatten(0, -2)
            return nn.functional.batch_norm(rows, mean, var, weight, bias, eps=self.eps).view(x.shape)
        mean, var = self._batch_statistics(x, valid, mean, var)
        scale = weight * torch.rsqrt(var + self.eps)
        return torch.addcmul(bias - mean * scale, x, scale)

    def _batch_statistics(
        self, x: Tensor, valid: Tensor | None, running_mean: Tensor, running_var: Tensor
    ) -> tuple[Tensor, Tensor]:
        rows = x.flatten(0, -2)
        if valid is None:
            weight = rows.new_ones(rows.shape[0], 1)
        else:
            weight = valid.flatten().unsqueeze(-1).to(x.dtype)
        if self.is_global and has_several_processes():
            count, mean, var = self._global_moments(rows, weight)
        elif valid is None:
            count = weight.sum()
            mean = rows.mean(dim=0)
            deviation = rows - mean
            # `var_mean` and `square` take several times as long on the CPU
            var = (deviation * deviation).mean(dim=0)
        else:
            count = weight.sum()
            mean = (rows * weight).sum(dim=0) / count.clamp(min=1)
            deviation = (rows - mean) * weight
            var = (deviation * deviation).sum(dim=0) / count.clamp(min=1)
        enough = count > 1
        if not _is_recomputing():
            self._update_running_statistics(mean, var, count, enough)
        return torch.where(enough, mean, running_mean), torch.where(enough, var, running_var)

    def _global_moments(self, rows: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Count, mean and variance of the rows of all processes, in one exchange."""
        # Around the running mean, which all processes share: squares of it would swallow the rest.
        center = self.running_mean.to(rows.dtype)
        deviation = (rows - center) * weight
        sums = torch.cat([weight.sum().view(1), deviation.sum(dim=0), deviation.square().sum(dim=0)])
        count, first, second = sum_over_processes(sums).split([1, len(center), len(center)])
        mean = first / count.clamp(min=1)
        var = (second / count.clamp(min=1) - mean.square()).clamp(min=0)
        return count.squeeze(0), center + mean, var

    @torch.no_grad()
    def _update_running_statistics(
        self, mean: Tensor, var: Tensor, count: Tensor, enough: Tensor
    ) -> None:
        # a batch that diverged leaves the statistics as they were
        counts = enough & mean.isfinite().all() & var.isfinite().all()
        momentum = torch.where(counts, self.momentum, 0.0)
        mean, var = (torch.where(counts, new, 0.0) for new in (mean, var))
        unbiased = var * count / (count - 1).clamp(min=1)
        self.running_mean.lerp_(mean.to(self.running_mean), momentum.to(self.running_mean))
        self.running_var.lerp_(unbiased.to(self.running_var), momentum.to(self.running_var))
        self.num_batches_tracked.add_(counts.to(self.num_batches_tracked.dtype))


def _is_recomputing() -> bool:
    """Whether this forward runs inside a backward pass, as a checkpointed layer's second does."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
