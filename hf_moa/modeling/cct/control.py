"""CCT's control networks: which parts of a layer a token takes (Bapna et al. 2020, "Controlling
Computation versus Quality for Neural Sequence Models").

In training a gate is a noisy sigmoid and the layer is computed in expectation, or it is hard and has the
sigmoid's gradient; in eval it is a hard 0/1 decision, and what is gated off is skipped. A budget tells
the model how much to compute: it is an input (control symbols in `budgets.py`, a bias here) and a target
(the budget loss, in `costs.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init

from .budgets import Budget
from .fast_control import fast_logits, takes_control_kernel

# Logit at which gates of a converted checkpoint start: sigmoid(4) = 0.982.
OPEN_GATE_LOGIT = 4.0


class ControlNetwork(nn.Module):
    """Gates of n parts for each token: `g = sigmoid(z + alpha * N(0, 1))` in training, the hard decision
    `sigmoid(z) >= 0.5` in eval (Bapna et al. 2020).

    `z = G(x) + b[budget]`, where G is Linear(d, hidden), ReLU, Linear(hidden, n), and b an optional bias
    of each budget on each gate, zero at the start (not the paper's).

    Args:
        hidden_size: d.
        gate_hidden_size: width of the hidden layer.
        num_gates: n.
        starts_open: initialise G to the constant `OPEN_GATE_LOGIT`, so that every gate is open.
        num_budgets: how many budgets have a bias, `budget_bias` `[num_budgets, n]`; 0 for no bias.
        is_hard: decide in training as in eval, with the gradient of the noisy sigmoid (straight-through,
            Bengio et al. 2013): `g = [p >= 0.5] + p - stop_gradient(p)`.
        execution: "auto", "sparse" or "dense", in eval; see `fast_control.py`.

    Shapes: `[B, T, d]` and the call's `Budget` -> `[B, T, n]`.

    Raises:
        ValueError: there is a bias, and no budget is given.
    """

    gate_kind = "cct"
    last_layer = "out"
    noise_scale: Tensor
    budget_bias: nn.Parameter | None

    def __init__(
        self,
        *,
        hidden_size: int,
        gate_hidden_size: int,
        num_gates: int,
        starts_open: bool,
        num_budgets: int = 0,
        is_hard: bool = False,
        execution: str = "auto",
    ):
        super().__init__()
        self.cct_execution = execution
        self.starts_open = starts_open
        self.num_gates = num_gates
        self.is_hard = is_hard
        self.forced: Callable[[ControlNetwork, Tensor], Tensor] | None = None  # see `set_cct_gates`
        self.dense = nn.Linear(hidden_size, gate_hidden_size)
        self.out = nn.Linear(gate_hidden_size, num_gates)
        bias = nn.Parameter(torch.zeros(num_budgets, num_gates)) if num_budgets else None
        self.register_parameter("budget_bias", bias)
        # A tensor, so that a change of the noise recompiles nothing. The trainer sets it.
        self.register_buffer("noise_scale", torch.zeros(()), persistent=False)

    @property
    def neutral_layers(self) -> tuple[str, ...]:
        return ("out",) if self.starts_open else ()

    def initialize(self, scales: Any = None) -> None:
        init.zeros_(self.noise_scale)
        if self.budget_bias is not None:
            init.zeros_(self.budget_bias)
        if self.starts_open:
            init.zeros_(self.out.weight)
            init.constant_(self.out.bias, OPEN_GATE_LOGIT)

    @property
    def is_untrained(self) -> bool:
        """Whether it still is the constant that a converted checkpoint starts from. On an accelerator no
        one looks: that would wait for all that was begun before."""
        weight = self.out.weight
        if not self.starts_open or self.forced is not None or weight.device.type != "cpu":
            return False
        if bool(weight.any()):
            return False
        return self.budget_bias is None or not bool(self.budget_bias.any())

    def forward(self, hidden_states: Tensor, budget: Budget | None = None) -> Tensor:
        if self.forced is not None and not self.training:
            # of logits, so that it takes as long; NaN is not skipped here either
            is_nan = self._logits(hidden_states, budget).isnan()
            return self.forced(self, hidden_states).masked_fill(is_nan, 1.0)
        if budget is not None and budget.is_plain:
            return hidden_states.new_ones(*hidden_states.shape[:-1], self.num_gates)
        gates = self._decide(self._logits(hidden_states, budget))
        if budget is None or budget.plain is None:
            return gates
        return torch.where(budget.plain[:, None, None], torch.ones_like(gates), gates)

    def _logits(self, hidden_states: Tensor, budget: Budget | None) -> Tensor:
        if takes_control_kernel(self, hidden_states):
            logits = fast_logits(self, hidden_states)
        else:
            logits = self.plain_logits(hidden_states)
        if self.budget_bias is None:
            return logits
        if budget is None:
            raise ValueError(
                "budget must be given where gates have a bias for each (got None): hand the layer the "
                "`Budget` of the call, as the models do."
            )
        # shape: (B, n) -> (B, 1, n)
        return logits + self.budget_bias[budget.index].unsqueeze(1)

    def plain_logits(self, hidden_states: Tensor) -> Tensor:
        """G(x), `[..., n]`."""
        return self.out(torch.relu(self.dense(hidden_states)))

    def _decide(self, logits: Tensor) -> Tensor:
        if not self.training:
            return _hard(logits)
        noisy = logits + torch.randn_like(logits) * self.noise_scale.to(logits.dtype)
        chance = torch.sigmoid(noisy)
        # what is added is exactly zero, and has the sigmoid's gradient
        return _hard(noisy) + (chance - chance.detach()) if self.is_hard else chance


def _hard(logits: Tensor) -> Tensor:
    return (~(logits < 0)).to(logits.dtype)  # NaN is not skipped: the result says it
