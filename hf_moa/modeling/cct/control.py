"""CCT's control networks: which parts of a layer a token takes (Bapna et al. 2020, "Controlling
Computation versus Quality for Neural Sequence Models").

In training a gate is a noisy sigmoid and the layer is computed in expectation; in eval it is a hard 0/1
decision, and what is gated off is skipped. A budget tells the model how much to compute: it is an input
(`budgets.py`) and a target (the budget loss, in `costs.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init

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
    noise_scale: Tensor

    def __init__(self, *, hidden_size: int, gate_hidden_size: int, num_gates: int, starts_open: bool):
        super().__init__()
        self.starts_open = starts_open
        self.num_gates = num_gates
        self.forced: Callable[[ControlNetwork, Tensor], Tensor] | None = None  # see `set_cct_gates`
        self.dense = nn.Linear(hidden_size, gate_hidden_size)
        self.out = nn.Linear(gate_hidden_size, num_gates)
        # A tensor, so that a change of the noise recompiles nothing. The trainer sets it.
        self.register_buffer("noise_scale", torch.zeros(()), persistent=False)

    @property
    def neutral_layers(self) -> tuple[str, ...]:
        return ("out",) if self.starts_open else ()

    def initialize(self, scales: Any = None) -> None:
        init.zeros_(self.noise_scale)
        if self.starts_open:
            init.zeros_(self.out.weight)
            init.constant_(self.out.bias, OPEN_GATE_LOGIT)

    def forward(self, hidden_states: Tensor) -> Tensor:
        if self.forced is not None and not self.training:
            return self.forced(self, hidden_states)
        logits = self.out(torch.relu(self.dense(hidden_states)))
        if not self.training:
            return (~(logits < 0)).to(logits.dtype)  # NaN is not skipped: the result says it
        noise = torch.randn_like(logits) * self.noise_scale.to(logits.dtype)
        return torch.sigmoid(logits + noise)
