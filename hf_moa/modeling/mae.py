"""MAE: a mixture of h-t heads (Peng et al. 2020, "A Mixture of h-1 Heads is Better than h Heads").

The experts are all subsets S of the h heads that drop t of them, in lexicographic order of the
dropped heads. With `H_j` the output of head j, its block of the output projection included,

    f_S(X) = h / (h - t) * sum_{j not in S} H_j
    Z      = sum_S g_S(X) f_S(X)

The mixture collapses to one weight per head, which is how it is computed:

    Z = sum_j w_j H_j,   w_j = h / (h - t) * (1 - sum_{S drops j} g_S)

Uniform gates give `w_j = 1`: multi-head attention.
"""

from __future__ import annotations

import math
from itertools import combinations

import torch
from torch import Tensor, nn

from .gate_cache import Window
from .gate_norm import GateBatchNorm
from .multi_head import MultiHead
from .precision import at_least_float32
from .process_sum import has_several_processes

MAE_PHASES = ("mixture", "gate", "expert")
EXPERT_SELECTIONS = ("argmax", "random", None)


def dropped_heads(num_heads: int, num_dropped: int) -> Tensor:
    """`[E, h]` 0/1 matrix: entry (S, j) is 1 where expert S drops head j. E = C(h, t)."""
    experts = list(combinations(range(num_heads), num_dropped))
    matrix = torch.zeros(len(experts), num_heads)
    matrix.scatter_(1, torch.tensor(experts), 1.0)
    return matrix


def head_weights(expert_weights: Tensor, dropped: Tensor, *, num_dropped: int) -> Tensor:
    """Collapse expert weights `[..., E]` to head weights `[..., h]` (module docstring)."""
    num_heads = dropped.shape[-1]
    scale = num_heads / (num_heads - num_dropped)
    # Autocast would round the weights of E experts to half precision before they are added up.
    with torch.autocast(expert_weights.device.type, enabled=False):
        return scale - scale * (expert_weights @ dropped.to(expert_weights.dtype))


def masked_mean(x: Tensor, mask: Tensor | None) -> Tensor:
    """Mean of `x` `[B, T, d]` over its real tokens -> `[B, d]`; zero where there are none."""
    if mask is None:
        return x.mean(dim=1)
    mask = mask.unsqueeze(-1)
    return x.masked_fill(~mask, 0.0).sum(dim=1) / mask.sum(dim=1).clamp(min=1)


def windowed_mean(x: Tensor, mask: Tensor | None, window: int | None) -> Tensor:
    """Mean at each position of the real tokens among the last `window` positions up to it.

    Args:
        x: `[B, T, d]`.
        mask: `[B, T]` bool, or None.
        window: positions, the present one included; None for all.

    Returns:
        `[B, T, d]`; zero where the window holds no real token.
    """
    length = x.shape[1]
    is_narrow = window is not None and window < length
    if mask is None:
        total = x.cumsum(dim=1)
        count = torch.arange(1, length + 1, device=x.device, dtype=x.dtype)
        count = (count.clamp(max=window) if is_narrow else count).unsqueeze(-1)
    else:
        total = x.masked_fill(~mask.unsqueeze(-1), 0.0).cumsum(dim=1)
        count = mask.unsqueeze(-1).cumsum(dim=1)
        if is_narrow:
            count = count - nn.functional.pad(count[:, :-window], (0, 0, window, 0))
        count = count.clamp(min=1)
    if is_narrow:
        total = torch.cat([total[:, :window], total[:, window:] - total[:, :-window]], dim=1)
    return total / count


class MaeGate(nn.Module):
    """The gate network g: pooled inputs -> a distribution over experts (Peng et al. 2020).

    BatchNorm, Linear(d, hidden), tanh, dropout, Linear(hidden, E), softmax. The last Linear starts
    at zero, so that a converted checkpoint computes what it did before.

    Args:
        hidden_size: d.
        num_experts: E.
        gate_hidden_size: width of the hidden layer.
        dropout: dropout on the hidden layer.

    Shapes: `pooled` `[..., d]`, `valid` `[...]` bool or None -> `[..., E]`, float32 at least. The
    hidden layer is computed in `dtype`.
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

    def forward(self, pooled: Tensor, valid: Tensor | None, *, dtype: torch.dtype) -> Tensor:
        hidden = self.norm(pooled, valid).to(dtype)
        hidden = self.dropout(torch.tanh(self.dense(hidden)))
        logits = self.out(hidden)
        return at_least_float32(logits).softmax(dim=-1)


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
        dropped = dropped_heads(self.num_heads, self.num_dropped)
        self.dropped.copy_(dropped.to(self.dropped))

    @property
    def remembers(self) -> bool:
        return self.is_causal and self.gate is not None

    def route(
        self, hidden_states: Tensor, padding_mask: Tensor | None, window: Window | None = None
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Weights of the heads for one call.

        Args:
            hidden_states: `[B, T, d]`, the inputs of the attention layer.
            padding_mask: `[B, T]` bool, the real tokens among them; None for all.
            window: causal layers with a cache: these inputs and those before them.

        Returns:
            Head weights `[B, 1, h]` (or `[B, T, h]` where causal; None stands for ones) and the
            record `{"expert_weights": [B, E] or [B, T, E]}`, the gate's distribution.
        """
        weights = self._expert_weights(hidden_states, padding_mask, window)
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

    def output(self, linear: nn.Module, context: Tensor, mix: Tensor | None) -> Tensor:
        """`Z = sum_j w_j H_j`: `[B, T, h, dh]` -> `[B, T, d]`."""
        if mix is not None:
            context = context * mix.unsqueeze(-1).to(context.dtype)
        return super().output(linear, context, mix)

    def _expert_weights(
        self, hidden_states: Tensor, padding_mask: Tensor | None, window: Window | None
    ) -> Tensor:
        batch, length = hidden_states.shape[:2]
        if self.gate is None:
            shape = (batch, length) if self.is_causal else (batch,)
            weights = hidden_states.new_full((*shape, self.num_experts), 1 / self.num_experts)
            return at_least_float32(weights)
        with torch.set_grad_enabled(
            torch.is_grad_enabled() and not (self.training and self.phase == "expert")
        ):
            valid = padding_mask
            if self.is_causal:
                inputs, mask = (hidden_states, padding_mask) if window is None else window
                pooled = windowed_mean(at_least_float32(inputs), mask, self.window)[:, -length:]
            else:
                pooled = masked_mean(at_least_float32(hidden_states), padding_mask)
                valid = None if padding_mask is None else padding_mask.any(dim=1)
            return self.gate(pooled, valid, dtype=hidden_states.dtype)

    def _idle_gate(self) -> Tensor | float:
        """Zero, and in a run of several processes a zero that has the gate in its graph: DDP waits for
        a gradient of every parameter."""
        if self.gate is None or not has_several_processes():
            return 0.0
        return 0.0 * sum(p.sum() for p in self.gate.parameters() if p.requires_grad)

    @staticmethod
    def _one_hot(index: Tensor, like: Tensor) -> Tensor:
        return nn.functional.one_hot(index, like.shape[-1]).to(like.dtype)
