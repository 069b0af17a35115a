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
from collections.abc import Callable
from itertools import combinations

import torch
from torch import Tensor, nn

from ..attention.multi_head import MultiHead
from ..cache.gate_states import GatePast
from ..cct.token_subset import TokenRows
from ..core.linear_slices import is_plain, is_watched
from ..core.precision import at_least_float32, cast, without_autocast
from ..core.process_sum import has_several_processes
from ..core.tracing import is_traced
from .fast_products import project_weighted, tanh_dropout
from .norm import GateBatchNorm
from .pooling import last_windowed_means, masked_mean, windowed_mean

MAE_PHASES = ("mixture", "gate", "expert")
EXPERT_SELECTIONS = ("argmax", "random", None)


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


class MaeGate(nn.Module):
    """The gate network g: pooled inputs -> a distribution over experts (Peng et al. 2020).

    BatchNorm, Linear(d, hidden), tanh, dropout, Linear(hidden, E), softmax. The last Linear starts
    at zero, so that a converted checkpoint computes what it did before.

    Args:
        hidden_size: d.
        num_experts: E.
        gate_hidden_size: width of the hidden layer.
        dropout: dropout on the hidden layer.

    Shapes: `x` `[..., d]`, `valid` `[...]` bool or None -> `[..., E]`, float32 at least.
    """

    gate_kind = "mae"

    def __init__(self, *, hidden_size: int, num_experts: int, gate_hidden_size: int, dropout: float):
        super().__init__()
        self.norm = GateBatchNorm(hidden_size)
        self.dense = nn.Linear(hidden_size, gate_hidden_size)
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(gate_hidden_size, num_experts)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(
        self,
        x: Tensor,
        valid: Tensor | None,
        *,
        dtype: torch.dtype,
        pool: Callable[[Tensor], Tensor] | None = None,
        past: GatePast | None = None,
    ) -> Tensor:
        """The distribution over experts.

        Args:
            x: pooled inputs; with `pool`, inputs that it averages.
            valid: which of them count towards batch statistics; None for all.
            dtype: of the hidden layer.
            pool: averages behind the hidden layer's matrix, on fewer features than in front of it. Up to
                there the network is affine in eval, and commutes with means. (But for those of no token:
                they are zero there.)
            past: what a generation holds of this gate; None where there is none, or a graph is made.
        """
        hidden = self._hidden(x, valid, dtype, past)
        if pool is not None:
            hidden = cast(pool(hidden), dtype)
        logits = self.out(self._activate(hidden))
        return at_least_float32(logits).softmax(dim=-1)

    def _activate(self, hidden: Tensor) -> Tensor:
        """`dropout(tanh(hidden))`."""
        dropout = self.dropout
        if type(dropout) is nn.Dropout and not is_watched(dropout):
            if not dropout.training:
                return torch.tanh(hidden)
            if 0 < dropout.p < 1:
                return tanh_dropout(hidden, dropout.p)
        return dropout(torch.tanh(hidden))

    def _hidden(
        self, x: Tensor, valid: Tensor | None, dtype: torch.dtype, past: GatePast | None
    ) -> Tensor:
        """`dense(norm(x))`."""
        norm, dense = self.norm, self.dense
        # its weight may be another module's to gather, as FSDP's
        is_own = type(norm) is GateBatchNorm and type(norm.weight) in (nn.Parameter, Tensor)
        stands_alone = is_own and not is_watched(norm)
        by_batch = stands_alone and norm.uses_batch_statistics
        if by_batch and is_plain(dense):
            # The norm's weight and bias go into the matrix: backward need not keep what they make.
            weight = dense.weight * norm.weight
            bias = dense.bias + dense.weight.to(weight.dtype) @ norm.bias
            x = norm.standardize(x, valid).to(dtype)
            return nn.functional.linear(x, weight.to(dtype), bias.to(dtype))
        if stands_alone and not by_batch and past is not None:
            x = at_least_float32(x)
            scale, shift = past.scale_and_shift(norm, x.dtype)
            return dense(cast(torch.addcmul(shift, x, scale), dtype))
        return dense(norm(x, valid).to(dtype))


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
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        num_dropped: int,
        gate_type: str,
        gate_hidden_size: int,
        gate_dropout: float,
        is_causal: bool,
        window: int | None,
    ):
        super().__init__(num_heads=num_heads, head_dim=head_dim)
        self.num_dropped = num_dropped
        self.num_experts = math.comb(num_heads, num_dropped)
        self.is_causal = is_causal
        self.window = window
        self.phase = "mixture"
        self.selection: str | None = None
        self.register_buffer("dropped", dropped_heads(num_heads, num_dropped), persistent=False)
        self.gate = None
        if gate_type == "learned":
            self.gate = MaeGate(
                hidden_size=hidden_size,
                num_experts=self.num_experts,
                gate_hidden_size=gate_hidden_size,
                dropout=gate_dropout,
            )

    def reset_buffers(self) -> None:
        """Fill the buffers that a checkpoint does not carry."""
        self.dropped.copy_(dropped_heads(self.num_heads, self.num_dropped))

    @property
    def remembers(self) -> bool:
        return self.is_causal and self.gate is not None

    def route(
        self, hidden_states: Tensor, padding_mask: Tensor | None, past: GatePast | None = None
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Weights of the heads for one call.

        Args:
            hidden_states: `[B, T, d]`, the inputs of the attention layer.
            padding_mask: `[B, T]` bool, the real tokens among them; None for all.
            past: causal layers with a cache: what is there of earlier tokens.

        Returns:
            Head weights `[B, 1, h]` (or `[B, T, h]` where causal; None stands for ones) and the
            record `{"expert_weights": [B, E] or [B, T, E]}`, the gate's distribution.
        """
        weights = self._expert_weights(hidden_states, padding_mask, past)
        record = {"expert_weights": weights}
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
        return (heads if self.is_causal else heads.unsqueeze(1)), record

    def take(self, mix: Tensor | None, rows: TokenRows) -> Tensor | None:
        return None if mix is None else rows.gather(mix.expand(*rows.chosen.shape, -1))

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
                return self._gate(hidden_states, padding_mask, past)
        return self._gate(hidden_states, padding_mask, past)

    @property
    def pools_inputs(self) -> bool:
        """Whether the gate averages its inputs, not what its first matrix makes of them: in training,
        for the statistics of the means."""
        return self.training or self.gate.training

    def _gate(self, hidden_states: Tensor, padding_mask: Tensor | None, past: GatePast | None) -> Tensor:
        length, dtype = hidden_states.shape[1], hidden_states.dtype
        if not self.is_causal:
            valid = None if padding_mask is None else padding_mask.any(dim=1)
            return self.gate(masked_mean(hidden_states, padding_mask), valid, dtype=dtype)

        def pool(rows: Tensor) -> Tensor:
            if past is not None:
                mean = past.mean(rows, padding_mask)
                if mean is not None:
                    return mean
                window = past.window(rows, padding_mask)
                if window.rows.shape[1] > length:  # rows of earlier calls
                    return last_windowed_means(window, self.window, last=length)
            return windowed_mean(rows, padding_mask, self.window)

        if self.pools_inputs:
            return self.gate(pool(hidden_states), padding_mask, dtype=dtype)
        makes_graph = torch.is_grad_enabled() or is_traced(hidden_states)
        held = None if makes_graph else past
        return self.gate(hidden_states, None, dtype=dtype, pool=pool, past=held)

    def _idle_gate(self) -> Tensor | float:
        """Zero, and in a run of several processes a zero that has the gate in its graph: DDP waits for
        a gradient of every parameter."""
        if self.gate is None or not has_several_processes():
            return 0.0
        return 0.0 * sum(p.sum() for p in self.gate.parameters() if p.requires_grad)

    @staticmethod
    def _one_hot(index: Tensor, like: Tensor) -> Tensor:
        return nn.functional.one_hot(index, like.shape[-1]).to(like.dtype)


def refuse_packed_rows(config, position_ids: Tensor) -> None:
    """Where positions start anew within a row, transformers' masks keep its texts apart. A causal gate,
    which averages a row's tokens, would not.

    Raises:
        ValueError: the positions `[B, T]` do not go up by 1, with learned gates.
    """
    if config.attention_type != "mae" or config.mae_gate_type != "learned" or is_traced(position_ids):
        return
    breaks = (position_ids.diff(dim=-1) != 1).nonzero()
    if len(breaks):
        *_, place = breaks[0].tolist()
        row = position_ids[breaks[0, 0]] if position_ids.ndim == 2 else position_ids
        raise ValueError(
            "Without an attention_mask, position_ids must go up by 1 in a model with MAE gates: these "
            "would mix the texts of a packed row (got "
            f"{row[place].item()} and {row[place + 1].item()} beside each other). Give each text a row "
            "of its own, padded and with an attention_mask."
        )
