"""Routers: which k of N experts a token uses, and with what weight.

`TopKRouter` is the router of MoA (Zhang et al. 2022); `NoisyTopKRouter` adds the trainable
noise of Shazeer et al. 2017 (eq. 3-5). Both serve attention experts and feed-forward experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..core.precision import at_least_float32
from ..core.process_sum import sum_over_processes
from .fast_choice import choose_experts, chooses_by_kernel
from .losses import (
    expert_counts,
    expert_load,
    importance_loss,
    load_balance_loss,
    load_loss,
    smooth_load,
    z_loss,
)


class Noise(NamedTuple):
    """The logits without their noise, and its standard deviation: `[B, T, N]` each."""

    clean: Tensor
    scale: Tensor


class Routing(NamedTuple):
    """What a router decided for every token; or several of the same sizes, stacked in front.

    Attributes:
        index: `[B, T, k]` int64, the chosen experts, best first; of several groups, one after the other;
            all experts in their order.
        weight: `[B, T, k]`, their weights, which sum to 1 over k.
        logits: `[B, T, N]`, the logits that were ranked (with noise where it was drawn).
        mask: `[B, T]` bool, real tokens; None for all.
        noise: of a noisy router; None of another.
        balances_globally: the load is that of all processes' tokens.
    """

    index: Tensor  # type: ignore[assignment]  # hides the method of tuples
    weight: Tensor
    logits: Tensor
    mask: Tensor | None
    noise: Noise | None
    balances_globally: bool

    @property
    def losses(self) -> dict[str, Tensor]:
        """Scalar auxiliary terms, not yet multiplied by their coefficients; padding excluded."""
        return self.measure()[0]

    @property
    def load(self) -> Tensor:
        """`[N]`, share of the assignments that each expert got, padding excluded."""
        return self.measure()[1]

    def counts(self) -> Tensor:
        """`[N]`, the assignments that each expert got from this process, padding excluded."""
        dtype = torch.promote_types(self.logits.dtype, torch.float32)
        return expert_counts(self.index, num_experts=self.logits.shape[-1], mask=self.mask, dtype=dtype)

    def measure(self, counts: Tensor | None = None) -> tuple[dict[str, Tensor], Tensor]:
        """`losses` and `load`.

        Args:
            counts: `[N]`, the assignments that each expert got, of all processes where the load is;
                None counts them.
        """
        # FSDP casts what a layer returns to the precision that it computes in
        logits, weight = at_least_float32(self.logits), at_least_float32(self.weight)
        if counts is None:
            counts = sum_over_processes(self.counts()) if self.balances_globally else self.counts()
        load = expert_load(counts)
        num_experts = logits.shape[-1]
        probabilities = logits.softmax(dim=-1)  # again: to hold those of all layers takes memory
        losses = {
            "router_balance_loss": load_balance_loss(probabilities, load, mask=self.mask),
            "router_z_loss": z_loss(logits, mask=self.mask),
            "router_importance_loss": importance_loss(
                weight, self.index, num_experts=num_experts, mask=self.mask
            ),
        }
        if self.noise is not None:
            clean, scale = map(at_least_float32, self.noise)
            smooth = smooth_load(clean, logits, scale, num_selected=self.index.shape[-1])
            losses["router_load_loss"] = load_loss(smooth, mask=self.mask)
        return losses, load


class TopKRouter(nn.Module):
    """Rank N experts for each token and keep the best k.

    With `p = softmax(x Wg)` and G the top k of p, the weight of expert i in G is
    `p_i / sum_{j in G} p_j` (Zhang et al. 2022).

    Args:
        hidden_size: d.
        num_experts: N.
        num_selected: k, at most N.
        detach_normalizer: keep the gradient of the weights' normaliser out, as MoA does. `False`
            is a softmax over the kept logits (Shazeer et al. 2017, eq. 3).
        num_groups: the experts stand in as many groups, one after the other, and the best k / num_groups
            of each are kept.

    Attributes:
        balances_globally: in training, the balance loss takes the load over all processes.

    Shapes: `hidden_states` `[B, T, d]`, `padding_mask` `[B, T]` bool or None -> `Routing`.
    """

    gate_kind = "router"
    last_layer = "gate"
    neutral_layers = ()

    def __init__(
        self,
        *,
        hidden_size: int,
        num_experts: int,
        num_selected: int,
        detach_normalizer: bool,
        num_groups: int = 1,
    ):
        super().__init__()
        self.num_experts = num_experts
        self.num_selected = num_selected
        self.num_groups = num_groups
        self.detach_normalizer = detach_normalizer
        self.gate = nn.Linear(hidden_size, num_experts, bias=False)
        self.balances_globally = False

    def forward(self, hidden_states: Tensor, padding_mask: Tensor | None = None) -> Routing:
        logits = at_least_float32(self.gate(hidden_states))
        return self.select(logits, padding_mask)

    def select(self, logits: Tensor, padding_mask: Tensor | None, noise: Noise | None = None) -> Routing:
        """Keep the k best of `logits` `[B, T, N]`."""
        if self.num_selected == self.num_experts:  # there is nothing to choose
            weight = logits.softmax(dim=-1)
            index = torch.arange(self.num_experts, device=logits.device).expand(logits.shape)
        elif self.num_groups == 1 and chooses_by_kernel(logits):
            weight, index = choose_experts(
                logits, self.num_selected, detach_normalizer=self.detach_normalizer
            )
        else:
            top, index = self._best(logits.softmax(dim=-1))
            normalizer = top.sum(dim=-1, keepdim=True)
            weight = top / (normalizer.detach() if self.detach_normalizer else normalizer)
        return Routing(
            index=index,
            weight=weight,
            logits=logits,
            mask=padding_mask,
            noise=noise,
            balances_globally=self.balances_globally and self.training,
        )

    def _best(self, probabilities: Tensor) -> tuple[Tensor, Tensor]:
        """The k that are kept, and which they are."""
        if self.num_groups == 1:
            return probabilities.topk(self.num_selected, dim=-1)
        size = self.num_experts // self.num_groups
        in_groups = probabilities.unflatten(-1, (self.num_groups, size))
        top, index = in_groups.topk(self.num_selected // self.num_groups, dim=-1)
        first = torch.arange(0, self.num_experts, size, device=index.device)
        return top.flatten(-2), (index + first.unsqueeze(-1)).flatten(-2)


class NoisyTopKRouter(TopKRouter):
    """`TopKRouter` on noisy logits (Shazeer et al. 2017, eq. 4).

    `H(x) = x Wg + N(0, 1) * softplus(x Wnoise)` in training; in eval the noise is left out.
    """

    def __init__(
        self, *, hidden_size: int, num_experts: int, num_selected: int, detach_normalizer: bool
    ):
        super().__init__(
            hidden_size=hidden_size,
            num_experts=num_experts,
            num_selected=num_selected,
            detach_normalizer=detach_normalizer,
        )
        self.noise = nn.Linear(hidden_size, num_experts, bias=False)

    def forward(self, hidden_states: Tensor, padding_mask: Tensor | None = None) -> Routing:
        clean = at_least_float32(self.gate(hidden_states))
        scale = nn.functional.softplus(at_least_float32(self.noise(hidden_states)))
        noisy = clean + torch.randn_like(clean) * scale if self.training else clean
        return self.select(noisy, padding_mask, Noise(clean, scale))


ROUTERS = {"topk": TopKRouter, "noisy_topk": NoisyTopKRouter}
