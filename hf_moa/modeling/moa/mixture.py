"""MoA: a mixture of attention heads, k of N per token (Zhang et al. 2022, "Mixture of Attention
Heads: Selecting Attention Heads Per Token").

Each expert i has its own query and output projection; all share one key and one value projection:

    y_t = sum_{i in G(t)} w_i softmax(x_t Wq_i K^T / sqrt(dh)) V Wo_i

The router decides G and w (`routing/routers.py`); the projections are `ExpertInput` and `ExpertOutput`.
The weights w sum to 1, so a new model's Wo start k times as large as the backbone's: k experts together
then have the scale of k heads. (The paper does not say how they start. Started at the backbone's scale,
they learn far more slowly; see `examples/reproduce/moa_start.py`.)
"""

from __future__ import annotations

from torch import Tensor, nn

from ..cache.gate_states import GatePast
from ..cct.token_subset import TokenRows
from ..routing.routers import ROUTERS, Routing


class MixtureOfAttentionExperts(nn.Module):
    """The MoA mixture of one attention layer: which experts a token uses, with what weight.

    Args:
        hidden_size: d.
        num_experts, num_selected: N and k.
        router_type: "topk" or "noisy_topk".
    """

    def __init__(self, *, hidden_size: int, num_experts: int, num_selected: int, router_type: str):
        super().__init__()
        self.router = ROUTERS[router_type](
            hidden_size=hidden_size,
            num_experts=num_experts,
            num_selected=num_selected,
            detach_normalizer=True,
        )

    remembers = False

    def route(
        self, hidden_states: Tensor, padding_mask: Tensor | None, past: GatePast | None = None
    ) -> tuple[Routing, dict]:
        """The routing of `[B, T, d]`, and the record: `router_logits` `[B, T, N]`, and `routings`, which
        is a list of this one."""
        routing = self.router(hidden_states, padding_mask)
        return routing, {"router_logits": routing.logits, "routings": [routing]}

    def take(self, mix: Routing, rows: TokenRows) -> Routing:
        """The routing of some of the tokens: their `index` and `weight` `[1, n, k]`."""
        return mix._replace(index=rows.gather(mix.index), weight=rows.gather(mix.weight))

    def no_mix(self, mix: Routing) -> Routing:
        """A routing for one token whose context is zero."""
        shape = (1, 1, mix.index.shape[-1])
        return mix._replace(index=mix.index.new_zeros(shape), weight=mix.weight.new_zeros(shape))

    def query(self, linear: nn.Module, hidden_states: Tensor, mix: Routing) -> Tensor:
        """`[B, T, d]` -> `[B, T, k, dh]`."""
        return linear(hidden_states, mix.index)

    def position_bias(self, bias: Tensor, mix: Routing) -> Tensor:
        """The chosen experts' biases: `[1, N, T, S]` -> `[B, k, T, S]`."""
        # shape: (B, T, k) -> (B, k, T, S)
        index = mix.index.transpose(1, 2).unsqueeze(-1)
        index = index.expand(-1, -1, -1, bias.shape[-1])
        return bias.expand(index.shape[0], -1, -1, -1).gather(1, index)

    def output(self, linear: nn.Module, context: Tensor, mix: Routing) -> Tensor:
        """`[B, T, k, dh]` -> `[B, T, d]`."""
        return linear(context, mix.index, mix.weight)
