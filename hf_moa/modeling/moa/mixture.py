"""MoA: a mixture of attention heads, k of N per token (Zhang et al. 2022, "Mixture of Attention
Heads: Selecting Attention Heads Per Token").

Each expert i has its own query and output projection; all share one key and one value projection:

    y_t = sum_{i in G(t)} w_i softmax(x_t Wq_i K^T / sqrt(dh)) V Wo_i

(With g heads of keys and values, the experts stand in g groups, of which each shares one; a token uses
k/g experts of each. With as many groups as experts, N = k, and even weights it is multi-head attention.)

The router decides G and w (`routing/routers.py`); the projections are `ExpertInput` and `ExpertOutput`.
The weights w sum to 1, so a new model's Wo start k times as large as the backbone's: k experts together
then have the scale of k heads. (The paper does not say how they start. Started at the backbone's scale,
they learn far more slowly; see `examples/reproduce/moa_start.py`.) Routers start at zero.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init

from ..attention.multi_head import Linear, MultiHead
from ..core.records import Record
from ..core.slots import MIXTURES
from ..parallel.plans import AttentionNames, Plan
from ..parallel.ranks import ONE_RANK
from ..routing.routers import ROUTERS, Routing
from .projections import ExpertInput, ExpertOutput


@MIXTURES.filled_by("moa")
class MixtureOfAttentionExperts(MultiHead):
    """The MoA mixture of one attention layer: which experts a token uses, with what weight.

    Args:
        hidden_size: d.
        num_experts, num_selected: N and k.
        head_dim: dh.
        num_kv_heads: g, a divisor of both.
        router_type: "topk" or "noisy_topk".
        execution: of the projections, "auto", "sparse" or "dense".
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        num_experts: int,
        num_selected: int,
        head_dim: int,
        num_kv_heads: int = 1,
        router_type: str = "topk",
        execution: str = "auto",
    ):
        super().__init__(num_heads=num_selected, head_dim=head_dim)
        self.moa_execution = execution
        self.num_experts = num_experts
        self.num_selected = num_selected
        self.num_kv_heads = num_kv_heads
        self.router = ROUTERS[router_type](
            hidden_size=hidden_size,
            num_experts=num_experts,
            num_selected=num_selected,
            detach_normalizer=True,
            **({"num_groups": num_kv_heads} if num_kv_heads > 1 else {}),
        )
        self.initialize()

    def initialize(self, scales: Any = None) -> None:
        """Start with a router that weighs all experts alike, as in the code that the paper's authors
        published. Routers that start as other linear layers do gave worse perplexities, which differed
        more between seeds (`model_cards/moa_routers.md`)."""
        init.zeros_(self.router.gate.weight)

    @classmethod
    def from_config(
        cls, config: Any, *, hidden_size: int, num_heads: int, head_dim: int, is_causal: bool
    ) -> MixtureOfAttentionExperts:
        return cls(
            hidden_size=hidden_size,
            num_experts=config.attention_experts,
            num_selected=num_heads,
            head_dim=head_dim,
            num_kv_heads=config.moa_key_value_heads,
            router_type=config.router_type,
            execution=config.moa_execution,
        )

    has_plain_projections = False
    has_joint_context = False

    @property
    def num_position_biases(self) -> int:
        return self.num_experts

    def make_query(self, linear: Linear, hidden_size: int, *, bias: bool = True) -> ExpertInput:
        return ExpertInput(
            num_experts=self.num_experts,
            in_features=hidden_size,
            out_features=self.head_dim,
            bias=bias,
            execution=self.moa_execution,
        )

    def make_output(self, linear: Linear, hidden_size: int, *, bias: bool = True) -> ExpertOutput:
        return ExpertOutput(
            num_experts=self.num_experts,
            in_features=self.head_dim,
            out_features=hidden_size,
            bias=bias,
            execution=self.moa_execution,
        )

    def route(
        self, hidden_states: Tensor, padding_mask: Tensor | None, place: Any = None
    ) -> tuple[Routing, Record]:
        routing = self.router(hidden_states, padding_mask)
        return routing, Record(routings=(routing,))

    def take(self, mix: Routing, subset: Any) -> Routing:
        """The routing of some of the tokens: their `index` and `weight` `[1, n, k]`."""
        return mix._replace(index=subset.gather(mix.index), weight=subset.gather(mix.weight))

    def no_mix(self, mix: Routing) -> Routing:
        shape = (1, 1, self.num_heads)
        index = torch.arange(self.num_heads, device=mix.index.device) * self.num_experts
        index = index // self.num_heads  # a slot of a group has one of the group's experts
        return mix._replace(index=index.view(shape), weight=mix.weight.new_zeros(shape))

    @property
    def _takes_all(self) -> bool:
        """Whether a token uses all experts, which then stand in their order."""
        return self.num_selected == self.num_experts and self.ranks is ONE_RANK

    def query(self, linear: nn.Module, hidden_states: Tensor, mix: Routing) -> Tensor:
        """`[B, T, d]` -> `[B, T, k, dh]`."""
        return linear(hidden_states, None if self._takes_all else mix.index)

    def position_bias(self, bias: Tensor, mix: Routing) -> Tensor:
        """The chosen experts' biases: `[1, N, T, S]` -> `[B, k, T, S]`; of all experts as they are."""
        if self._takes_all:
            return bias
        bias = self.ranks.shared(bias)
        # shape: (B, T, k) -> (B, k, T, S)
        index = self.ranks.part(mix.index, -1).transpose(1, 2).unsqueeze(-1)
        index = index.expand(-1, -1, -1, bias.shape[-1])
        return bias.expand(index.shape[0], -1, -1, -1).gather(1, index)

    def output(self, linear: nn.Module, context: Tensor, mix: Routing) -> Tensor:
        """`[B, T, k, dh]` -> `[B, T, d]`."""
        index = None if self._takes_all else mix.index
        return linear(context, index, mix.weight)

    @classmethod
    def splits_keys(cls, config: Any) -> bool:
        return config.moa_key_value_heads > 1

    @classmethod
    def tensor_plan(cls, config: Any, names: AttentionNames) -> Plan:
        """Each rank has some of the experts, and the keys that all share, or those of its groups."""
        if cls.splits_keys(config):
            plan = {name: names.kind.outputs(parts) for name, parts in names.keys.items()}
            return plan | {names.query: "moa_group_inputs", names.output: "moa_group_outputs"}
        plan = dict.fromkeys(names.keys, "moa_shared_output")
        return plan | {names.query: "moa_expert_inputs", names.output: "moa_expert_outputs"}

    def spread_over(self, ranks: Any, num_kv_heads: int) -> tuple[int, int]:
        ranks.check("num_attention_experts", self.num_experts)
        if num_kv_heads > 1:
            return super().spread_over(ranks, num_kv_heads)
        # one head of keys, which all ranks have
        return super().spread_over(ranks, ranks.number)
