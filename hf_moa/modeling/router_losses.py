"""Auxiliary losses of routers, as pure functions of one layer's routing.

Each takes `mask` `[B, T]` bool (True for real tokens; None for all), so that padding never counts,
and returns a scalar. Coefficients are applied by the model, which sums over layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .process_sum import sum_over_processes

# Keeps CV^2 finite where nothing was routed (a batch of padding only).
_EPSILON = 1e-10


def expert_load(
    probabilities: Tensor, index: Tensor, *, mask: Tensor | None, over_processes: bool = False
) -> Tensor:
    """Share of the k * tokens assignments that each expert got, `[N]` without gradient; they sum to 1
    (zeros where there was nothing to route).

    Args:
        probabilities: `[B, T, N]`, of all experts; what they are does not matter.
        index: `[B, T, k]` int64, chosen experts.
        over_processes: count the tokens of all processes, not of this one alone.
    """
    valid = _validity(probabilities, mask)
    # shape: (B, T, k) -> (N,)
    chosen = torch.zeros_like(probabilities).scatter(-1, index, 1.0)
    counts = (chosen * valid).sum(dim=(0, 1))
    if over_processes:
        counts = sum_over_processes(counts)
    return counts / counts.sum().clamp(min=1)


def load_balance_loss(probabilities: Tensor, load: Tensor, *, mask: Tensor | None) -> Tensor:
    """`N * sum_i f_i P_i` (Zhang et al. 2022; Fedus et al. 2021): 1 where load is even.

    f_i is the load of expert i, P_i its mean probability. With a load over all processes, the mean of
    the processes' losses is the loss of the whole batch (where they have equally many tokens).

    Args:
        probabilities: `[B, T, N]`, softmax over all experts.
        load: `[N]`, of `expert_load`.
    """
    valid = _validity(probabilities, mask)
    mean_probability = (probabilities * valid).sum(dim=(0, 1)) / valid.sum().clamp(min=1)
    return probabilities.shape[-1] * (load * mean_probability).sum()


def z_loss(logits: Tensor, *, mask: Tensor | None) -> Tensor:
    """`mean(logsumexp(logits)^2)` over tokens (Zhang et al. 2022; Zoph et al. 2022).

    Args:
        logits: `[B, T, N]`.
    """
    valid = _validity(logits, mask)
    squared = logits.logsumexp(dim=-1, keepdim=True).square()
    return (squared * valid).sum() / valid.sum().clamp(min=1)


def importance_loss(weight: Tensor, index: Tensor, *, num_experts: int, mask: Tensor | None) -> Tensor:
    """CV^2 of the experts' summed gate values (Shazeer et al. 2017, eq. 6-7).

    Args:
        weight: `[B, T, k]`, gate values of the chosen experts.
        index: `[B, T, k]` int64, chosen experts.
        num_experts: N.
    """
    valid = _validity(weight, mask)
    gates = weight.new_zeros(*weight.shape[:-1], num_experts).scatter(-1, index, weight)
    return squared_coefficient_of_variation((gates * valid).sum(dim=(0, 1)))


def load_loss(load: Tensor, *, mask: Tensor | None) -> Tensor:
    """CV^2 of the experts' smooth expected load (Shazeer et al. 2017, eq. 11).

    Args:
        load: `[B, T, N]`, the probabilities of `smooth_load`.
    """
    valid = _validity(load, mask)
    return squared_coefficient_of_variation((load * valid).sum(dim=(0, 1)))


def smooth_load(clean: Tensor, noisy: Tensor, scale: Tensor, *, num_selected: int) -> Tensor:
    """Probability that a fresh draw of its own noise keeps each expert in the top k.

    `P(x, i) = Phi((clean_i - kth_excluding(H, k, i)) / scale_i)`, where `kth_excluding` is the k-th
    largest of the other experts' noisy logits (Shazeer et al. 2017, eq. 8-9).

    Args:
        clean: `[B, T, N]`, logits without noise.
        noisy: `[B, T, N]`, logits with the noise that was drawn (H).
        scale: `[B, T, N]`, standard deviation of the noise.
        num_selected: k.

    Returns:
        `[B, T, N]`. With k = N every expert is kept: ones, without gradient.
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
    """`(standard deviation / mean)^2` of a vector, with the population's variance."""
    return x.var(correction=0) / (x.mean().square() + _EPSILON)


def _validity(like: Tensor, mask: Tensor | None) -> Tensor:
    """`[B, T, 1]` in the dtype of `like`: 1 for real tokens, 0 for padding."""
    if mask is None:
        return like.new_ones(*like.shape[:-1], 1)
    return mask.unsqueeze(-1).to(like.dtype)
