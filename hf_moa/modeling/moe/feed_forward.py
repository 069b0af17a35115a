"""Sparsely-gated mixture of feed-forward experts (Shazeer et al. 2017).

The experts run on transformers' experts interface (`model.set_experts_implementation(...)`), which
brings grouped matrix products on CPU and CUDA.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.integrations import use_experts_implementation
from transformers.integrations.moe import ExpertsInterface

from ..core.activations import build_activation
from ..core.initialization import InitScales
from ..core.macs import Macs, macs_of_experts
from ..core.precision import without_autocast
from ..core.records import Record
from ..core.slots import FEED_FORWARDS
from ..core.tracing import is_transformed
from ..routing.routers import ROUTERS


class _PortableExperts(ExpertsInterface):
    """transformers' implementations, with the plain loop where `grouped_mm` has no kernel."""

    def get_interface(self, experts_implementation, default):
        chosen = super().get_interface(experts_implementation, default)
        if experts_implementation not in ("grouped_mm", "batched_mm"):
            return chosen

        def chosen_or_loop(experts, *args, **kwargs):
            if experts_implementation == "grouped_mm" and not _grouped_mm_runs_on(experts):
                return default(experts, *args, **kwargs)
            if experts.has_wide_down:
                return _chosen_with_wide_down(chosen, experts, *args, **kwargs)
            return chosen(_WithTokenBiases(experts) if experts.bias else experts, *args, **kwargs)

        return chosen_or_loop


def _grouped_mm_runs_on(experts: FeedForwardExperts) -> bool:
    weights = (experts.up_weight, experts.down_proj)
    aligned = all(w.shape[-1] * w.element_size() % 16 == 0 for w in weights)
    return aligned and experts.down_proj.dtype != torch.float64


# What a wide product's result is divided by, since these implementations return the dtype that they were
# given.
_NARROW = 256


def _chosen_with_wide_down(
    chosen: Callable, experts: FeedForwardExperts, x: Tensor, index: Tensor, weights: Tensor
) -> Tensor:
    """Experts whose last matrix is float32: `[tokens, d]` in float32, which half may not hold."""
    y = chosen(_WithWideDown(experts), x, index, weights / _NARROW)
    return y.to(experts.down_proj.dtype) * _NARROW


class _WithWideDown:
    """Experts whose activation is of the last matrix's dtype."""

    def __init__(self, experts: FeedForwardExperts):
        self._experts = experts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._experts, name)

    def act_fn(self, x: Tensor) -> Tensor:
        return self._experts.act_fn(x).to(self._experts.down_proj.dtype)

    def _apply_gate(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return self.act_fn(first) * second


class _WithTokenBiases:
    """Experts as these implementations see them, which ask for `bias[expert_ids]`, one a token."""

    def __init__(self, experts: FeedForwardExperts):
        self._experts = experts

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._experts, name)
        return _TokenBiases(found) if name in ("up_proj_bias", "down_proj_bias") else found


class _TokenBiases:
    """`bias[expert_ids]`, with a gradient that is a matrix product: autograd's adds up those of an
    expert one after the other, which takes a GPU several times as long as all else in the layer."""

    def __init__(self, bias: Tensor):
        self.bias = bias

    def __getitem__(self, expert_ids: Tensor) -> Tensor:
        # TorchScript saves no Python function
        if is_transformed(self.bias) or torch.jit.is_tracing():
            return self.bias[expert_ids]
        return _TakeBiases.apply(self.bias, expert_ids)


class _TakeBiases(torch.autograd.Function):
    @staticmethod
    def forward(ctx, bias, expert_ids):
        ctx.save_for_backward(expert_ids)
        ctx.num_experts = len(bias)
        return bias[expert_ids]

    @staticmethod
    def backward(ctx, grad):
        (expert_ids,) = ctx.saved_tensors
        experts = torch.arange(ctx.num_experts, device=grad.device)
        with without_autocast(grad.device.type):
            # shape: (N, rows) @ (rows, width)
            return (expert_ids == experts.unsqueeze(-1)).to(grad.dtype) @ grad, None


class FeedForwardExperts(nn.Module):
    """N feed-forward networks in stacked parameters; the subclasses say of what form.

    Parameters: `up_proj` `[N, ff, d]` (or `gate_up_proj` `[N, 2 * ff, d]`: first the half that is
    activated, then the one it multiplies), `down_proj` `[N, d, ff]`, and their biases.
    Shapes: `hidden_states` `[tokens, d]`, `top_k_index` and `top_k_weights` `[tokens, k]`
    -> `[tokens, d]`, the weighted sum over the k experts of each token.
    """

    is_gated = False
    bias = False
    up_proj: nn.Parameter
    gate_up_proj: nn.Parameter
    up_proj_bias: nn.Parameter
    down_proj_bias: nn.Parameter

    def __init__(
        self, config, *, num_experts: int, hidden_size: int, intermediate_size: int, activation: str
    ):
        super().__init__()
        self.num_experts = num_experts
        up_size = intermediate_size * (2 if self.is_gated else 1)
        up = nn.Parameter(torch.empty(num_experts, up_size, hidden_size))
        self.register_parameter("gate_up_proj" if self.is_gated else "up_proj", up)
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))
        if self.bias:
            self.up_proj_bias = nn.Parameter(torch.zeros(num_experts, up_size))
            self.down_proj_bias = nn.Parameter(torch.zeros(num_experts, hidden_size))
        self.act_fn = build_activation(activation)
        nn.init.normal_(up, std=hidden_size**-0.5)
        nn.init.normal_(self.down_proj, std=intermediate_size**-0.5)

    def initialize(self, scales: InitScales) -> None:
        init.normal_(self.up_weight, std=scales.up)
        init.normal_(self.down_proj, std=scales.down)
        if self.bias:
            init.zeros_(self.up_proj_bias)
            init.zeros_(self.down_proj_bias)

    def count_macs(self, hidden_states: Tensor, index: Tensor, *args: Any, **kwargs: Any) -> Macs:
        up, down = (macs_of_experts(weight, index) for weight in (self.up_weight, self.down_proj))
        return Macs(up.total + down.total, up.active + down.active)

    @property
    def has_wide_down(self) -> bool:
        """Whether the last matrix is of another dtype: T5's stays float32 in half, as its `wo` does."""
        return self.up_weight.dtype != self.down_proj.dtype

    @property
    def up_weight(self) -> Tensor:
        return self.gate_up_proj if self.is_gated else self.up_proj

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        dtype = self.down_proj.dtype if self.has_wide_down else hidden_states.dtype
        output = torch.zeros_like(hidden_states, dtype=dtype)
        linear = nn.functional.linear
        for expert in range(self.num_experts):
            token, slot = torch.where(top_k_index == expert)
            up_bias = self.up_proj_bias[expert] if self.bias else None
            down_bias = self.down_proj_bias[expert] if self.bias else None
            up = linear(hidden_states[token], self.up_weight[expert], up_bias)
            if self.is_gated:
                activated, multiplied = up.chunk(2, dim=-1)
                up = self.act_fn(activated) * multiplied
            else:
                up = self.act_fn(up)
            up = up.to(dtype) if self.has_wide_down else up
            down = linear(up, self.down_proj[expert], down_bias)
            weighted = down * top_k_weights[token, slot, None].to(down.dtype)
            output = output.index_add(0, token, weighted.to(output.dtype))
        return output


_experts = partial(use_experts_implementation, experts_interface=_PortableExperts(), is_transposed=False)


@_experts(has_gate=False, has_bias=True)
class BiasedExperts(FeedForwardExperts):
    """`W2 act(W1 x + b1) + b2`, as in BERT and GPT-2."""

    bias = True


@_experts(has_gate=False, has_bias=False)
class UnbiasedExperts(FeedForwardExperts):
    """`W2 act(W1 x)`, as in T5."""


@_experts(has_gate=True, has_bias=False)
class GatedExperts(FeedForwardExperts):
    """`W2 (act(W1 x) * W3 x)`, as in T5's "gated-gelu"."""

    is_gated = True


# (is_gated, bias) -> the experts of that form
EXPERTS = {
    (False, True): BiasedExperts,
    (False, False): UnbiasedExperts,
    (True, False): GatedExperts,
}


@FEED_FORWARDS.filled_by("moe")
class SparseMoeFeedForward(nn.Module):
    """A feed-forward layer of N experts, k of them active per token.

    `y = sum_i G(x)_i E_i(x)` (Shazeer et al. 2017, eq. 1), G a softmax over the k kept logits.

    Args:
        config: read by transformers' experts interface for the implementation only.
        hidden_size: d.
        intermediate_size: width of one expert.
        activation: name of the activation.
        is_gated, bias: form of an expert; see `DenseFeedForward`.
        num_experts, num_selected: N and k.
        router_type: "topk" or "noisy_topk".

    Shapes: `[B, T, d]`, `padding_mask` `[B, T]` bool or None -> `[B, T, d]` and the record of the
    routing.
    """

    computes_tokens_alone = False  # padding counts in its losses

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
        is_gated: bool = False,
        bias: bool = True,
    ):
        super().__init__()
        self.router = ROUTERS[router_type](
            hidden_size=hidden_size,
            num_experts=num_experts,
            num_selected=num_selected,
            detach_normalizer=False,
        )
        self.experts = EXPERTS[is_gated, bias](
            config,
            num_experts=num_experts,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            activation=activation,
        )

    @classmethod
    def from_config(cls, config: Any, **shape: Any) -> SparseMoeFeedForward:
        """Of the sizes and form of the backbone's own layer; experts have no dropout inside."""
        shape.pop("dropout")
        return cls(
            config,
            num_experts=config.num_ffn_experts,
            num_selected=config.num_ffn_experts_per_token,
            router_type=config.router_type,
            **shape,
        )

    def forward(
        self, hidden_states: Tensor, padding_mask: Tensor | None = None, budget: Any = None
    ) -> tuple[Tensor, Record]:
        routing = self.router(hidden_states, padding_mask)
        output = self.experts(
            hidden_states.flatten(0, -2),
            routing.index.flatten(0, -2),
            routing.weight.flatten(0, -2).to(hidden_states.dtype),
        )
        return output.view(hidden_states.shape), Record(routings=(routing,))

    @staticmethod
    def expert_plan(layer: str) -> dict[str, str]:
        """Each rank has some of the experts; see `parallel/plans.py`."""
        names = ("up_proj", "gate_up_proj", "up_proj_bias", "down_proj", "down_proj_bias")
        plan = {f"{layer}.experts.{name}": "grouped_gemm" for name in names}
        return plan | {f"{layer}.experts": "ep_dispatch_experts"}
