"""Sparsely-gated mixture of feed-forward experts (Shazeer et al. 2017).

The experts run on transformers' experts interface (`model.set_experts_implementation(...)`), which
brings grouped matrix products on CPU and CUDA.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.integrations import use_experts_implementation
from transformers.integrations.moe import ExpertsInterface

from .routing import ROUTERS


class _PortableExperts(ExpertsInterface):
    """transformers' implementations, with the plain loop where `grouped_mm` has no kernel."""

    def get_interface(self, experts_implementation, default):
        chosen = super().get_interface(experts_implementation, default)
        if experts_implementation != "grouped_mm":
            return chosen

        def grouped_mm_or_loop(experts, *args, **kwargs):
            weight = experts.up_proj
            aligned = all(size * weight.element_size() % 16 == 0 for size in weight.shape[1:])
            supported = aligned and weight.dtype != torch.float64
            return (chosen if supported else default)(experts, *args, **kwargs)

        return grouped_mm_or_loop


@use_experts_implementation(
    experts_interface=_PortableExperts(), has_gate=False, has_bias=True, is_transposed=False
)
class FeedForwardExperts(nn.Module):
    """N feed-forward networks `W2 act(W1 x + b1) + b2` in stacked parameters.

    Shapes: `hidden_states` `[tokens, d]`, `top_k_index` and `top_k_weights` `[tokens, k]`
    -> `[tokens, d]`, the weighted sum over the k experts of each token.
    """

    def __init__(
        self, config, *, num_experts: int, hidden_size: int, intermediate_size: int, activation: str
    ):
        super().__init__()
        self.num_experts = num_experts
        self.up_proj = nn.Parameter(torch.empty(num_experts, intermediate_size, hidden_size))
        self.up_proj_bias = nn.Parameter(torch.zeros(num_experts, intermediate_size))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))
        self.down_proj_bias = nn.Parameter(torch.zeros(num_experts, hidden_size))
        self.act_fn = ACT2FN[activation]
        nn.init.normal_(self.up_proj, std=hidden_size**-0.5)
        nn.init.normal_(self.down_proj, std=intermediate_size**-0.5)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        output = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, slot = torch.where(top_k_index == expert)
            up = nn.functional.linear(
                hidden_states[token], self.up_proj[expert], self.up_proj_bias[expert]
            )
            down = nn.functional.linear(
                self.act_fn(up), self.down_proj[expert], self.down_proj_bias[expert]
            )
            weighted = down * top_k_weights[token, slot, None].to(down.dtype)
            output = output.index_add(0, token, weighted.to(output.dtype))
        return output


class SparseMoeFeedForward(nn.Module):
    """A feed-forward layer of N experts, k of them active per token.

    `y = sum_i G(x)_i E_i(x)` (Shazeer et al. 2017, eq. 1), G a softmax over the k kept logits.

    Args:
        config: read by transformers' experts interface for the implementation only.
        hidden_size: d.
        intermediate_size: width of one expert.
        activation: name of the activation.
        num_experts, num_selected: N and k.
        router_type: "topk" or "noisy_topk".

    Shapes: `[B, T, d]`, `padding_mask` `[B, T]` bool or None -> `[B, T, d]` and the record
    `{"losses": ...}`.
    """

    def __init__(
        self,
        config,
        *,
        hidden_size: int,
        intermediate_size: int,
        activation: str,
        num_experts: int,
        num_selected: int,
        router_type: str,
    ):
        super().__init__()
        self.router = ROUTERS[router_type](
            hidden_size=hidden_size,
            num_experts=num_experts,
            num_selected=num_selected,
            detach_normalizer=False,
        )
        self.experts = FeedForwardExperts(
            config,
            num_experts=num_experts,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            activation=activation,
        )

    def forward(
        self, hidden_states: Tensor, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        routing = self.router(hidden_states, padding_mask)
        output = self.experts(
            hidden_states.flatten(0, -2),
            routing.index.flatten(0, -2),
            routing.weight.flatten(0, -2).to(hidden_states.dtype),
        )
        return output.view(hidden_states.shape), {"losses": routing.losses}
