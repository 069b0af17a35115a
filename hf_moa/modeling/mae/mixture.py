"""MAE: a mixture of h-t heads (Peng et al. 2020, "A Mixture of h-1 Heads is Better than h Heads").

The experts are all subsets S of the h heads that drop t of them, in lexicographic order of the
dropped heads. With `H_j` the output of head j, its block of the output projection included,

    f_S(X) = h / (h - t) * sum_{j not in S} H_j
    Z      = sum_S g_S(X) f_S(X)

The mixture collapses to one weight per head, which is how it is computed:

    Z = sum_j w_j H_j,   w_j = h / (h - t) * sum_{S keeps j} g_S

Uniform gates give `w_j = 1`: multi-head attention.
"""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from ..attention.multi_head import MultiHead
from ..cache.gate_states import GatePast, gated_layer
from ..cache.naming import CACHE_NAME
from ..cache.place import CachePlace, is_empty
from ..core.precision import at_least_float32, without_autocast
from ..core.process_sum import in_process_group
from ..core.records import Record
from ..core.slots import MIXTURES
from ..core.tracing import is_traced
from .fast_gate import fast_gates, is_fast
from .fast_products import project_weighted
from .gate import MaeGate
from .pooling import last_windowed_means, masked_mean, windowed_mean

# Names of what gates hold in a layer of the cache: in training their inputs, in eval what their first
# matrix makes of these, which are of another width.
_GATE_STATES = ("gate_inputs", "gate_features")
_CROSS_GATE_STATES = ("cross_gate_inputs", "cross_gate_features")


def dropped_heads(num_heads: int, num_dropped: int) -> Tensor:
    """`[E, h]` 0/1 matrix: entry (S, j) is 1 where expert S drops head j. E = C(h, t)."""
    experts = list(combinations(range(num_heads), num_dropped))
    matrix = torch.zeros(len(experts), num_heads)
    matrix.scatter_(1, torch.tensor(experts), 1.0)
    return matrix


def head_weights(expert_weights: Tensor, dropped: Tensor, *, num_dropped: int) -> Tensor:
    """Collapse expert weights `[..., E]`, which sum to 1, to head weights `[..., h]`:
    `w_j = h / (h - t) * (1 - sum_{S drops j} g_S)`.

    Args:
        dropped: `[E, h]`, of `dropped_heads`.
        num_dropped: t.
    """
    num_heads = dropped.shape[-1]
    scale = num_heads / (num_heads - num_dropped)
    if num_dropped == 1:  # expert j is the one that drops head j
        lost = expert_weights
    else:
        # autocast would round the weights of E experts to half precision before they are added up
        with without_autocast(expert_weights.device.type):
            lost = expert_weights @ dropped.to(expert_weights.dtype)
    return torch.rsub(lost, scale, alpha=scale)


@MIXTURES.filled_by("mae")
class MixtureOfHeads(MultiHead):
    """The MAE mixture of one attention layer: which weight each head has.

    `phase` ("mixture", "gate", "expert") rules training and `selection` ("argmax", "random", None)
    rules eval; the model sets both (`set_mae_phase`, `set_expert_selection`). In the "expert" phase
    (the F step) one expert is drawn from Cat(g), without a gradient to the gate. The "gate" phase
    (the G step) is the mixture; the model keeps gradients from all but the gates.

    Args:
        hidden_size: d.
        num_heads, head_dim: h, dh.
        num_dropped: t.
        gate_type: "learned" or "uniform".
        gate_hidden_size, gate_dropout: of `MaeGate`.
        is_causal: gate each position on the inputs up to it, instead of each sequence on all.
        window: inputs that a causal gate averages; None for all.

    Raises:
        ValueError: an unknown gate_type; a number of dropped heads that leaves none, or drops none.
    """

    dropped: Tensor

    def __init__(
        self,
        *,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        num_dropped: int = 1,
        gate_type: str = "learned",
        gate_hidden_size: int = 256,
        gate_dropout: float = 0.1,
        is_causal: bool = False,
        window: int | None = 100,
    ):
        super().__init__(num_heads=num_heads, head_dim=head_dim)
        if gate_type not in ("learned", "uniform"):
            raise ValueError(f"gate_type must be 'learned' or 'uniform' (got {gate_type!r}).")
        if not 0 < num_dropped < num_heads:
            raise ValueError(
                f"num_dropped must be at least 1 and below num_heads={num_heads} (got {num_dropped})."
            )
        self.num_dropped = num_dropped
        self.num_experts = math.comb(num_heads, num_dropped)
        self.is_causal = is_causal
        self.window = window
        self.phase = "mixture"
        self.selection: str | None = None
        self.register_buffer("dropped", dropped_heads(num_heads, num_dropped), persistent=False)
        self.gate: MaeGate | None = None
        if gate_type == "learned":
            self.gate = MaeGate(
                hidden_size=hidden_size,
                num_experts=self.num_experts,
                gate_hidden_size=gate_hidden_size,
                dropout=gate_dropout,
            )

    @classmethod
    def from_config(
        cls, config: Any, *, hidden_size: int, num_heads: int, head_dim: int, is_causal: bool
    ) -> MixtureOfHeads:
        return cls(
            hidden_size=hidden_size,
            num_heads=num_heads,
            head_dim=head_dim,
            num_dropped=config.mae_num_dropped_heads,
            gate_type=config.mae_gate_type,
            gate_hidden_size=config.mae_gate_hidden_size,
            gate_dropout=config.mae_gate_dropout,
            is_causal=is_causal,
            window=config.mae_gate_window,
        )

    def initialize(self, scales: Any = None) -> None:
        """Fill the buffer that a checkpoint does not carry."""
        self.dropped.copy_(dropped_heads(self.num_heads, self.num_dropped))

    has_phases = True

    @property
    def remembers(self) -> bool:  # type: ignore[override]  # a constant of other mixtures
        return self.is_causal and self.gate is not None

    @property
    def sees_other_tokens(self) -> bool:  # type: ignore[override]  # the same
        return self.gate is not None

    def route(
        self, hidden_states: Tensor, padding_mask: Tensor | None, place: CachePlace | None = None
    ) -> tuple[Tensor | None, Record]:
        """Weights of the heads for one call.

        Args:
            hidden_states: `[B, T, d]`, the inputs of the attention layer.
            padding_mask: `[B, T]` bool, the real tokens among them; None for all.
            place: the layer's in a cache, where causal gates find earlier tokens.

        Returns:
            Weights of the rank's heads, `[B, 1, h]` (or `[B, T, h]` where causal; None stands for ones),
            and the record of the gate's distribution.
        """
        past = None if place is None or not self.remembers else self._past(place)
        weights = self._expert_weights(hidden_states, padding_mask, past)
        record = Record(expert_weights=weights)
        chosen = weights
        if self.training and self.phase == "expert":
            # as `torch.multinomial` draws, without its refusal of NaN: a loss of NaN says more
            index = (weights / torch.empty_like(weights).exponential_()).argmax(dim=-1)
            chosen = self._one_hot(index, weights) + self._idle_gate()
        elif not self.training and self.selection == "argmax":
            chosen = self._one_hot(weights.argmax(dim=-1), weights)
        elif not self.training and self.selection == "random":
            index = torch.randint(self.num_experts, weights.shape[:-1], device=weights.device)
            chosen = self._one_hot(index, weights)
        elif self.gate is None:
            return None, record
        heads = head_weights(chosen, self.dropped, num_dropped=self.num_dropped)
        heads = self.ranks.part(heads, -1)
        return (heads if self.is_causal else heads.unsqueeze(1)), record

    def take(self, mix: Tensor | None, subset: Any) -> Tensor | None:
        return None if mix is None else subset.gather(mix.expand(*subset.shape, -1))

    def take_heads(self, mix: Tensor | None, number: int) -> Tensor | None:
        return None if mix is None else mix[..., :number]

    def spread_over(self, ranks: Any, num_kv_heads: int) -> tuple[int, int]:
        if self.gate is not None:
            self.gate.norm.copies = ranks.number
        return super().spread_over(ranks, num_kv_heads)

    def prepare_cache(self, place: CachePlace) -> None:
        if self.remembers:
            gated_layer(_where_tokens_are(place))

    def _past(self, place: CachePlace) -> GatePast:
        """What the gate finds in a cache."""
        layer = gated_layer(_where_tokens_are(place))
        names = _CROSS_GATE_STATES if place.is_cross else _GATE_STATES
        name, other = names if self.pools_inputs else reversed(names)
        if other in layer.states:
            if not is_empty(layer):
                raise ValueError(
                    f"{CACHE_NAME} was filled in another mode, train() or eval(), than the model is "
                    "in now, and its gates remember other numbers there. Use a cache in one mode."
                )
            for each in (other, f"{other}_valid"):  # as after a reset
                layer.states.pop(each, None)
        # cross-attention's gate comes behind self-attention, whose layer it asks
        return GatePast(layer, name, self.window, are_held=place.is_cross)

    def output(self, linear: nn.Module, context: Tensor, mix: Tensor | None) -> Tensor:
        """`Z = sum_j w_j H_j`: `[B, T, h, dh]` -> `[B, T, d]`."""
        if mix is not None:
            mix = mix.unsqueeze(-1).to(context.dtype)
            if self.training and torch.is_grad_enabled():
                return project_weighted(linear, context, mix)
            # a new tensor of this size costs the CPU more than the product
            context = context * mix if torch.is_grad_enabled() else context.mul_(mix)
        return super().output(linear, context, mix)

    def _expert_weights(
        self, hidden_states: Tensor, padding_mask: Tensor | None, past: GatePast | None
    ) -> Tensor:
        batch, length = hidden_states.shape[:2]
        if self.gate is None:
            shape = (batch, length) if self.is_causal else (batch,)
            weights = hidden_states.new_full((*shape, self.num_experts), 1 / self.num_experts)
            return at_least_float32(weights)
        if self.training and self.phase == "expert":
            with torch.no_grad():
                return self._gated(self.gate, hidden_states, padding_mask, past)
        return self._gated(self.gate, hidden_states, padding_mask, past)

    @property
    def pools_inputs(self) -> bool:
        """Whether the gate averages its inputs, not what its first matrix makes of them: in training,
        for the statistics of the means."""
        return self.training or (self.gate is not None and self.gate.training)

    def _gated(
        self,
        gate: MaeGate,
        hidden_states: Tensor,
        padding_mask: Tensor | None,
        past: GatePast | None,
    ) -> Tensor:
        length, dtype = hidden_states.shape[1], hidden_states.dtype
        if not self.is_causal:
            valid = None if padding_mask is None else padding_mask.any(dim=1)
            return gate(masked_mean(hidden_states, padding_mask), valid, dtype=dtype)
        window = self.window
        if window is not None and is_fast(gate, hidden_states, window, past):
            return fast_gates(gate, hidden_states, padding_mask, window=window, past=past)

        def pool(inputs: Tensor) -> Tensor:
            if past is not None:
                mean = past.mean(inputs, padding_mask)
                if mean is not None:
                    return mean
                window = past.window(inputs, padding_mask)
                if window.entries.shape[1] > length:  # there are some of earlier calls
                    return last_windowed_means(window, self.window, last=length)
            return windowed_mean(inputs, padding_mask, self.window)

        if self.pools_inputs:
            return gate(pool(hidden_states), padding_mask, dtype=dtype)
        makes_graph = torch.is_grad_enabled() or is_traced(hidden_states)
        held = None if makes_graph else past
        return gate(hidden_states, None, dtype=dtype, pool=pool, past=held)

    def _idle_gate(self) -> Tensor | float:
        """Zero, and in a run of several processes a zero that has the gate in its graph: DDP waits for
        a gradient of every parameter."""
        if self.gate is None or not in_process_group():
            return 0.0
        return 0.0 * sum(p.sum() for p in self.gate.parameters() if p.requires_grad)

    @staticmethod
    def _one_hot(index: Tensor, like: Tensor) -> Tensor:
        return nn.functional.one_hot(index, like.shape[-1]).to(like.dtype)


def _where_tokens_are(place: CachePlace) -> CachePlace:
    """Where a gate's inputs are kept: also cross-attention's gate follows the decoder's tokens, which
    self-attention's layer of the cache counts."""
    return place._replace(is_cross=False)
