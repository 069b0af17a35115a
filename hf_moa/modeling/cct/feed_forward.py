"""CCT's part in a feed-forward layer: M parts, each with its own gate (Bapna et al. 2020)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..routing.routers import Routing
from .costs import FeedForwardUse
from .gates import ControlNetwork
from .token_subset import Execution, GatedParts, TokenRows, choose_execution


class FeedForwardGate(nn.Module):
    """Gates of the M parts of a feed-forward layer, and what they cost.

    Args:
        hidden_size: d.
        gate_hidden_size: of the control network.
        num_splits: M.
        part_cost: multiply-accumulates of one part for one token.
        starts_open: see `ControlNetwork`.
        execution: "auto", "sparse" or "dense", in eval.
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        gate_hidden_size: int,
        num_splits: int,
        part_cost: int,
        starts_open: bool,
        execution: str,
    ):
        super().__init__()
        self.execution = execution
        self.num_splits = num_splits
        self.part_cost = part_cost
        self.control = ControlNetwork(
            hidden_size=hidden_size,
            gate_hidden_size=gate_hidden_size,
            num_gates=num_splits,
            starts_open=starts_open,
        )

    def forward(
        self, hidden_states: Tensor, padding_mask: Tensor | None
    ) -> tuple[Tensor, dict[str, Any]]:
        """`[B, T, d]` -> gates `[B, T, M]`, and the record of their `use`."""
        gates = self.control(hidden_states)
        return gates, {"use": FeedForwardUse(self.part_cost, gates, padding_mask)}

    def choose_execution(self, gates: Tensor) -> Execution:
        """How this call is computed."""
        if self.training or self.control.training:
            return Execution.GATED
        return choose_execution(self.execution, GatedParts(gates, self.part_cost))

    def split(self, activation: Tensor, gates: Tensor) -> Tensor:
        """Gate the M slices of a hidden activation `[B, T, ff]`.

        `W2 (g * act(W1 x))` is the gated sum of the parts that share the layer's matrices; its bias
        is not gated. This is the form without extra LayerNorms.
        """
        parts = torch.unflatten(activation, -1, (self.num_splits, -1))
        return (parts * gates.unsqueeze(-1).to(parts.dtype)).flatten(-2)


class GatedFeedForward(nn.Module):
    """`sum_m g_m LN_out_m(F_m(LN_in_m(x)))`, for M parts with parameters of their own.

    Args:
        parts: the M networks F_m; each maps `(x, padding_mask)` to `(y, record)`.
        gate: their gates.
        hidden_size: d.
        norm: makes LN for a width.
        parts_are_rowwise: whether a part computes each token by itself: then it can skip some.
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        gate: FeedForwardGate,
        *,
        hidden_size: int,
        norm: Callable[[int], nn.Module],
        parts_are_rowwise: bool,
    ):
        super().__init__()
        self.parts_are_rowwise = parts_are_rowwise
        self.gate = gate
        self.parts = nn.ModuleList(parts)

        self.input_norms = nn.ModuleList(norm(hidden_size) for _ in parts)
        self.output_norms = nn.ModuleList(norm(hidden_size) for _ in parts)

    def forward(
        self, hidden_states: Tensor, padding_mask: Tensor | None
    ) -> tuple[Tensor, dict[str, Any]]:
        """`[B, T, d]` -> `[B, T, d]` and the record, with `routings` of the parts that have experts."""
        gates, record = self.gate(hidden_states, padding_mask)
        execution = self.gate.choose_execution(gates)
        if self.parts_are_rowwise and execution is Execution.ROWS:
            return self._sparse(hidden_states, gates), record
        output = torch.zeros_like(hidden_states)
        routings: list[Routing] = []
        modules = zip(self.parts, self.input_norms, self.output_norms, strict=True)
        for m, (part, input_norm, output_norm) in enumerate(modules):
            y, part_record = part(input_norm(hidden_states), padding_mask)
            y = output_norm(y)
            if execution is not Execution.OPEN:
                y = y * gates[..., m : m + 1].to(y.dtype)
            output = output + y
            routings += part_record.get("routings", [])
        return output, record | {"routings": routings}

    def _sparse(self, hidden_states: Tensor, gates: Tensor) -> Tensor:
        """The same, of each part's tokens with an open gate."""
        output = None
        modules = zip(self.parts, self.input_norms, self.output_norms, strict=True)
        parts_rows = TokenRows.of_parts(gates > 0)
        for rows, (part, input_norm, output_norm) in zip(parts_rows, modules, strict=True):
            if len(rows):
                y = output_norm(part(input_norm(rows.gather(hidden_states)), None)[0])
                if output is None:  # a part may compute in another dtype than its inputs'
                    output = y.new_zeros(hidden_states.shape)
                rows.add_to(output, y)
        return torch.zeros_like(hidden_states) if output is None else output
