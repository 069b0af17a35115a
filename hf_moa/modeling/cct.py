"""CCT: conditional computation per token (Bapna et al. 2020, "Controlling Computation versus
Quality for Neural Sequence Models").

Small control networks gate the parts of each layer. In training a gate is a noisy sigmoid and the
layer is computed in expectation; in eval it is a hard 0/1 decision, and what is gated off is
skipped. A budget tells the model how much to compute: it is an input (a control symbol added to
every token embedding) and a target (the budget loss, in `cct_costs.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from .cct_costs import AttentionCost
from .configuration_gating import is_budget

# Logit at which gates of a converted checkpoint start: sigmoid(4) = 0.982.
OPEN_GATE_LOGIT = 4.0


class ControlNetwork(nn.Module):
    """Gates of n parts for each token: `g = sigmoid(G(x) + alpha * N(0, 1))` in training, the hard
    decision `sigmoid(G(x)) >= 0.5` in eval (Bapna et al. 2020).

    G is Linear(d, hidden), ReLU, Linear(hidden, n).

    Args:
        hidden_size: d.
        gate_hidden_size: width of the hidden layer.
        num_gates: n.
        starts_open: initialise G to the constant `OPEN_GATE_LOGIT`, so that every gate is open.

    Shapes: `[B, T, d]` -> `[B, T, n]`.
    """

    def __init__(self, *, hidden_size: int, gate_hidden_size: int, num_gates: int, starts_open: bool):
        super().__init__()
        self.starts_open = starts_open
        self.dense = nn.Linear(hidden_size, gate_hidden_size)
        self.out = nn.Linear(gate_hidden_size, num_gates)
        # A tensor, so that a change of the noise recompiles nothing. The trainer sets it.
        self.register_buffer("noise_scale", torch.zeros(()), persistent=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        logits = self.out(torch.relu(self.dense(hidden_states)))
        if not self.training:
            return (logits >= 0).to(logits.dtype)
        noise = torch.randn_like(logits) * self.noise_scale.to(logits.dtype)
        return torch.sigmoid(logits + noise)


class AttentionGates(NamedTuple):
    """Gates of one attention layer: `kv` `[B, S]` and `query` `[B, T]`; `kv` is None where keys
    and values come from the cache."""

    kv: Tensor | None
    query: Tensor


class GatedAttentionControl(nn.Module):
    """CCT's part in one attention layer (Bapna et al. 2020).

    One gate for the key and value projections of a token, one for its query, attention and output:
    `K = g_kv LN(Y Wk)`, `V = g_kv LN(Y Wv)`, `z = x + g_q LN(a) Wo`. A skipped key has logit 0 and
    counts in the softmax. Biases of the output projection are not gated.

    Args:
        hidden_size: d.
        gate_hidden_size: of `ControlNetwork`.
        kv_size: width of the projected keys (and values) of a token.
        context_size: width that `LN(a)` normalises.
        joint_context: whether that is all heads together, or each (attention expert) by itself.
        sublayer_norm: whether the LayerNorms are there.
        is_cross_attention: keys and values come from other tokens, with a control network of
            their own.
        norm_eps: of the LayerNorms.
        cost: what the gates can skip.
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        gate_hidden_size: int,
        kv_size: int,
        context_size: int,
        joint_context: bool,
        sublayer_norm: bool,
        is_cross_attention: bool,
        norm_eps: float,
        cost: AttentionCost,
    ):
        super().__init__()
        self.cost = cost
        self.joint_context = joint_context

        def network(num_gates: int) -> ControlNetwork:
            return ControlNetwork(
                hidden_size=hidden_size,
                gate_hidden_size=gate_hidden_size,
                num_gates=num_gates,
                starts_open=not sublayer_norm,
            )

        self.control = network(1 if is_cross_attention else 2)
        self.source_control = network(1) if is_cross_attention else None
        self.key_norm = make_norm(kv_size, eps=norm_eps, present=sublayer_norm)
        self.value_norm = make_norm(kv_size, eps=norm_eps, present=sublayer_norm)
        self.context_norm = make_norm(context_size, eps=norm_eps, present=sublayer_norm)

    def gates(self, hidden_states: Tensor, source: Tensor | None) -> AttentionGates:
        """Gates for the tokens `[B, T, d]` and, in cross-attention, for `source` `[B, S, d]`
        (None where keys and values are cached)."""
        gates = self.control(hidden_states)
        if self.source_control is None:
            return AttentionGates(kv=gates[..., 0], query=gates[..., 1])
        kv = None if source is None else self.source_control(source)[..., 0]
        return AttentionGates(kv=kv, query=gates[..., 0])

    def gate_key_value(self, key: Tensor, value: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
        """`g_kv LN(.)` of `key` and `value` `[B, S, kv_size]`."""
        gate = gate.unsqueeze(-1).to(key.dtype)
        return self.key_norm(key) * gate, self.value_norm(value) * gate

    def gate_context(self, context: Tensor, gate: Tensor) -> Tensor:
        """`g_q LN(a)` of `context` `[B, T, heads, dh]`."""
        gate = gate[..., None, None].to(context.dtype)
        if not self.joint_context:
            return self.context_norm(context) * gate
        normed = self.context_norm(context.flatten(-2))
        return normed.view(context.shape) * gate


class Budget(NamedTuple):
    """The budgets of one call: `index` `[B]` into the distinct budgets, their `value` `[B]`, and
    the control symbols `embedding` `[B, 1, d]`."""

    index: Tensor
    value: Tensor
    embedding: Tensor


class BudgetControl(nn.Module):
    """The budgets that a model knows, their control symbols, and the choice of one per sequence.

    Args:
        budgets: the configured list; repeats are sampling weights.
        hidden_size: d.
        symbols_start_at_zero: control symbols of a converted checkpoint start at zero.
    """

    def __init__(self, budgets: list[float], *, hidden_size: int, symbols_start_at_zero: bool):
        super().__init__()
        self.sampled = [float(budget) for budget in budgets]
        self.distinct = sorted(set(self.sampled), reverse=True)
        self.symbols_start_at_zero = symbols_start_at_zero
        self.control_symbols = nn.Embedding(len(self.distinct), hidden_size)
        self.chosen: float | None = None

    def choose(self, budget: float | None) -> None:
        """Use `budget` wherever a call names none; None undoes it."""
        if budget is not None:
            self.position(budget)
        self.chosen = budget

    def position(self, budget: float) -> int:
        """Index of `budget` among the distinct budgets.

        Raises:
            ValueError: it is not one of them.
        """
        for i, known in enumerate(self.distinct):
            if is_budget(budget) and abs(known - budget) < 1e-6:
                return i
        raise ValueError(
            f"budget must be one of the model's budgets {self.distinct} (got {budget!r}). "
            "They are set by `cct_budgets` in the config."
        )

    def forward(self, batch_size: int, device: torch.device, budget=None) -> Budget:
        """Resolve the budgets of a batch.

        Args:
            batch_size: B.
            device: of the index.
            budget: a number for all, a tensor or list `[B]` with one per sequence, or None: the
                chosen one if any; else in training a uniform draw from the list for each sequence,
                in eval the largest.
        """
        index = self._index(batch_size, device, self.chosen if budget is None else budget)
        value = torch.tensor(self.distinct, device=device)[index]
        return Budget(index, value, self.control_symbols(index).unsqueeze(1))

    def _index(self, batch_size: int, device: torch.device, budget) -> Tensor:
        if budget is None and self.training:
            table = torch.tensor([self.distinct.index(b) for b in self.sampled], device=device)
            return table[torch.randint(len(table), (batch_size,), device=device)]
        if budget is None:
            return torch.zeros(batch_size, dtype=torch.long, device=device)
        if isinstance(budget, Tensor):
            budget = budget.to(device)
            return self._tensor_index(budget if budget.ndim else budget.expand(batch_size), batch_size)
        if isinstance(budget, (list, tuple)):
            return self._tensor_index(torch.tensor(budget, device=device), batch_size)
        return torch.full((batch_size,), self.position(budget), device=device)

    def _tensor_index(self, budget: Tensor, batch_size: int) -> Tensor:
        if budget.shape != (batch_size,):
            raise ValueError(
                f"budget must be a number or hold one number per sequence: shape ({batch_size},) "
                f"(got shape {tuple(budget.shape)})."
            )
        table = torch.tensor(self.distinct, device=budget.device, dtype=torch.float64)
        distance = (budget.double().unsqueeze(-1) - table).abs()
        closest, index = distance.min(dim=-1)
        # float32 tensors hold 0.33 to 1e-8, bfloat16 ones to 1e-3.
        tolerance = torch.finfo(budget.dtype).eps if budget.is_floating_point() else 0.0
        known = (closest <= tolerance).all()  # False for NaN too
        if torch.compiler.is_compiling():
            torch._assert_async(known)
        elif budget.dtype == torch.bool or not bool(known):
            raise ValueError(
                f"budget must hold budgets of the model, {self.distinct} (got {budget.tolist()}). "
                "They are set by `cct_budgets` in the config."
            )
        return index


def make_norm(size: int, *, eps: float, present: bool) -> nn.Module:
    """One of the paper's extra LayerNorms, or nothing in its place."""
    return nn.LayerNorm(size, eps=eps) if present else nn.Identity()
