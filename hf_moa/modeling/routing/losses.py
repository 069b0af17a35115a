"""Auxiliary losses of routers, as pure functions of what they decided.

Each takes tensors of one layer, or of several that are stacked in front (`[..., B, T, N]`), and gives a
scalar for each; and `mask` `[B, T]` bool (True for real tokens; None for all), so that padding never
counts. Coefficients are applied by the model, which sums over layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Keeps CV^2 finite where nothing was routed (a batch of padding only).
_EPSILON = 1e-10


def expert_counts(
    index: Tensor, *, num_experts: int, mask: Tensor | None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """How many of the k * tokens assignments each expert got, `[..., N]` without gradient.

    Args:
        index: `[..., B, T, k]` int64, chosen experts.
        num_experts: N.
        dtype: to count in; half precision would stop at a few hundred.
    """
    ones = torch.ones(index.shape, dtype=dtype, device=index.device)
    return _sum_by_expert(ones, index, num_experts, mask)


def expert_load(counts: Tensor) -> Tensor:
    """The experts' shares of the assignments, `[..., N]`; they sum to 1 (zeros where nothing was
    routed).

    Args:
        counts: `[..., N]`, of `expert_counts`, of this process or of all.
    """
    return counts / counts.sum(dim=-1, keepdim=True).clamp(min=1)


def load_balance_loss(probabilities: Tensor, load: Tensor, *, mask: Tensor | None) -> Tensor:
    """`N * sum_i f_i P_i` (Zhang et al. 2022; Fedus et al. 2021): 1 where load is even.

    f_i is the load of expert i, P_i its mean probability. With a load over all processes, the mean of
    the processes' losses is the loss of the whole batch (where they have equally many tokens).

    Args:
        probabilities: `[..., B, T, N]`, softmax over all experts.
        load: `[..., N]`, of `expert_load`.
    """
    return probabilities.shape[-1] * (load * _mean(probabilities, mask)).sum(dim=-1)


def z_loss(logits: Tensor, *, mask: Tensor | None) -> Tensor:
    """`mean(logsumexp(logits)^2)` over tokens (Zhang et al. 2022; Zoph et al. 2022).

    Args:
        logits: `[..., B, T, N]`.
    """
    return _mean(logits.logsumexp(dim=-1, keepdim=True).square(), mask).squeeze(-1)


def importance_loss(weight: Tensor, index: Tensor, *, num_experts: int, mask: Tensor | None) -> Tensor:
    """CV^2 of the experts' summed gate values (Shazeer et al. 2017, eq. 6-7).

    Args:
        weight: `[..., B, T, k]`, gate values of the chosen experts.
        index: `[..., B, T, k]` int64, chosen experts.
        num_experts: N.
    """
    return squared_coefficient_of_variation(_sum_by_expert(weight, index, num_experts, mask))


def load_loss(load: Tensor, *, mask: Tensor | None) -> Tensor:
    """CV^2 of the experts' smooth expected load (Shazeer et al. 2017, eq. 11).

    Args:
        load: `[..., B, T, N]`, the probabilities of `smooth_load`.
    """
    return squared_coefficient_of_variation(_sum(load, mask))


def smooth_load(clean: Tensor, noisy: Tensor, scale: Tensor, *, num_selected: int) -> Tensor:
    """Probability that a fresh draw of its own noise keeps each expert in the top k.

    `P(x, i) = Phi((clean_i - kth_excluding(H, k, i)) / scale_i)`, where `kth_excluding` is the k-th
    largest of the other experts' noisy logits (Shazeer et al. 2017, eq. 8-9).

    Args:
        clean: `[..., B, T, N]`, logits without noise.
        noisy: `[..., B, T, N]`, logits with the noise that was drawn (H).
        scale: `[..., B, T, N]`, standard deviation of the noise.
        num_selected: k.

    Returns:
        `[..., B, T, N]`. With k = N every expert is kept: ones, without gradient.
    """
    num_experts = clean.shape[-1]
    if num_selected >= num_experts:
        return torch.ones_like(clean)
    top, index = noisy.topk(num_selected + 1, dim=-1)
    # Without expert i, the k-th largest is the (k+1)-th where i is kept, else the k-th.
    kept = torch.zeros_like(noisy, dtype=torch.bool)
    kept = kept.scatter(-1, index[..., :num_selected], torch.ones_like(kept))
    threshold = torch.where(kept, top[..., -1:], top[..., -2:-1])
    # softplus underflows to 0, where the quotient has no gradient
    return torch.special.ndtr((clean - threshold) / scale.clamp(min=_EPSILON))


def squared_coefficient_of_variation(x: Tensor) -> Tensor:
    """`(standard deviation / mean)^2` of vectors `[..., N]`, with the population's variance."""
    return x.var(dim=-1, correction=0) / (x.mean(dim=-1).square() + _EPSILON)


def _sum(x: Tensor, mask: Tensor | None) -> Tensor:
    """Over the real tokens: `[..., B, T, N]` -> `[..., N]`."""
    return (x if mask is None else x * mask.unsqueeze(-1).to(x.dtype)).sum(dim=(-3, -2))


def _mean(x: Tensor, mask: Tensor | None) -> Tensor:
    """Over the real tokens: `[..., B, T, N]` -> `[..., N]`; zero where there are none."""
    count = x.new_full((), x.shape[-3] * x.shape[-2]) if mask is None else mask.sum()
    return _sum(x, mask) / count.clamp(min=1)


def _sum_by_expert(x: Tensor, index: Tensor, num_experts: int, mask: Tensor | None) -> Tensor:
    """Over the real tokens that chose each expert: `[..., B, T, k]` -> `[..., N]`."""
    x = x if mask is None else x * mask.unsqueeze(-1).to(x.dtype)
    sums = x.new_zeros(*x.shape[:-3], num_experts)
    return sums.scatter_add(-1, index.flatten(-3), x.flatten(-3))
