"""CCT: conditional computation per token (Bapna et al. 2020, "Controlling Computation versus
Quality for Neural Sequence Models").

Small control networks gate the parts of each layer. In training a gate is a noisy sigmoid and the
layer is computed in expectation; in eval it is a hard 0/1 decision, and what is gated off is
skipped. A budget tells the model how much to compute: it is an input (`budgets.py`) and a target
(the budget loss, in `costs.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

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

    gate_kind = "cct"

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
            return (~(logits < 0)).to(logits.dtype)  # NaN is not skipped: the result says it
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
    `K = g_kv LN(Y Wk)`, `V = g_kv LN(Y Wv)`, `z = x + g_q Dropout(LN(a)) Wo`. A skipped key has logit 0
    and counts in the softmax. Biases of the output projection are not gated.

    Args:
        hidden_size: d.
        gate_hidden_size: of `ControlNetwork`.
        kv_size: width of the projected keys (and values) of a token.
        context_size: width that `LN(a)` normalises.
        joint_context: whether that is all heads together, or each (attention expert) by itself.
        norm: makes LN for a width.
        context_dropout: rate of that dropout.
        is_cross_attention: keys and values come from other tokens, with a control network of
            their own.
        starts_open: see `ControlNetwork`.
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        gate_hidden_size: int,
        kv_size: int,
        context_size: int,
        joint_context: bool,
        norm: Callable[[int], nn.Module],
        context_dropout: float,
        is_cross_attention: bool,
        starts_open: bool,
    ):
        super().__init__()
        self.joint_context = joint_context

        def network(num_gates: int) -> ControlNetwork:
            return ControlNetwork(
                hidden_size=hidden_size,
                gate_hidden_size=gate_hidden_size,
                num_gates=num_gates,
                starts_open=starts_open,
            )

        self.control = network(1 if is_cross_attention else 2)
        self.source_control = network(1) if is_cross_attention else None
        self.key_norm = norm(kv_size)
        self.value_norm = norm(kv_size)
        self.context_norm = norm(context_size)
        self.context_dropout = nn.Dropout(context_dropout)

    @property
    def is_soft(self) -> bool:
        """Whether the control networks decide softly: in training, if it is theirs alone."""
        networks = (self.control, self.source_control)
        return any(network.training for network in networks if network is not None)

    def gates(self, hidden_states: Tensor, source: Tensor | None) -> AttentionGates:
        """Gates for the tokens `[B, T, d]` and, in cross-attention, for `source` `[B, S, d]`
        (None where keys and values are cached)."""
        gates = self.control(hidden_states)
        if self.source_control is None:
            return AttentionGates(kv=gates[..., 0], query=gates[..., 1])
        kv = None if source is None else self.source_control(source)[..., 0]
        return AttentionGates(kv=kv, query=gates[..., 0])

    def gate_key_value(self, key: Tensor, value: Tensor, gate: Tensor | None) -> tuple[Tensor, Tensor]:
        """`g_kv LN(.)` of `key` and `value` `[B, S, kv_size]`; None for gates that are all open."""
        key, value = self.key_norm(key), self.value_norm(value)
        if gate is None:
            return key, value
        gate = gate.unsqueeze(-1).to(key.dtype)
        return key * gate, value * gate

    def gate_context(self, context: Tensor, gate: Tensor | None) -> Tensor:
        """`g_q Dropout(LN(a))` of `context` `[B, T, heads, dh]`; None for gates that are all open."""
        context = self.context_dropout(self.norm_context(context))
        return context if gate is None else context * gate[..., None, None].to(context.dtype)

    def norm_context(self, context: Tensor) -> Tensor:
        """`LN(a)` of `context` `[B, T, heads, dh]`."""
        if not self.joint_context:
            return self.context_norm(context)
        return self.context_norm(context.flatten(-2)).view(context.shape)


def sublayer_norm(config, norm: Callable[[int], nn.Module]) -> Callable[[int], nn.Module]:
    """The paper's extra LayerNorms, made by `norm`; or nothing in their place, where
    `cct_sublayer_norm` leaves them out."""
    return norm if config.cct_sublayer_norm else lambda size: nn.Identity()


def attention_dropouts(config, rate: float) -> tuple[float, float]:
    """Dropout rates before and behind the output projection of attention, for a backbone that has
    `rate` behind it: the paper's layout has it before."""
    return (rate, 0.0) if config.has_cct and config.cct_sublayer_norm else (0.0, rate)
