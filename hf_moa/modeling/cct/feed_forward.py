"""CCT's part in a feed-forward layer: M parts, each with its own gate (Bapna et al. 2020).

`FeedForwardGate` gates slices of a dense layer's hidden activation; `GatedFeedForward` has M networks of
their own, each with the paper's LayerNorms. Which of the two computes only some of the tokens, and how,
is in `sparse_feed_forward.py`, and for a GPU in `open_tokens.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ..core.linear_slices import is_plain
from ..core.macs import Macs
from ..core.records import Record
from ..parallel.own_linear import is_only_split
from ..parallel.ranks import ONE_RANK, Ranks, TensorRanks
from .budgets import Budget
from .control import ControlNetwork
from .costs import FeedForwardUse
from .execution import Execution, GatedParts, choose_execution
from .open_tokens import (
    computes_open_parts,
    computes_open_slices,
    open_parts,
    open_slices,
)
from .sparse_feed_forward import sparse_parts, sparse_slices, sparse_slices_of_ranks


class FeedForwardGate(nn.Module):
    """Gates of the M parts of a feed-forward layer, and what they cost.

    Args:
        hidden_size: d.
        gate_hidden_size: of the control network.
        num_splits: M.
        part_cost: multiply-accumulates of one part for one token.
        starts_open, num_budgets, is_hard: see `ControlNetwork`.
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
        num_budgets: int = 0,
        is_hard: bool = False,
    ):
        super().__init__()
        self.cct_execution = execution
        self.num_splits = num_splits
        self.part_cost = part_cost
        self.control = ControlNetwork(
            hidden_size=hidden_size,
            gate_hidden_size=gate_hidden_size,
            num_gates=num_splits,
            starts_open=starts_open,
            num_budgets=num_budgets,
            is_hard=is_hard,
            execution=execution,
        )

    def forward(
        self, hidden_states: Tensor, padding_mask: Tensor | None, budget: Budget | None = None
    ) -> tuple[Tensor, Record]:
        """`[B, T, d]` -> gates `[B, T, M]`, and the record of their use."""
        gates = self.control(hidden_states, budget)
        return gates, Record(use=FeedForwardUse(self.part_cost, gates, padding_mask))

    # what has some of the neurons
    ranks: Ranks = ONE_RANK

    def spread_over(self, ranks: Ranks) -> None:
        """Gate a rank's neurons."""
        self.ranks = ranks

    def choose_execution(self, gates: Tensor, budget: Budget | None = None) -> Execution:
        """How this call is computed."""
        if budget is not None and budget.is_plain:
            return Execution.ALL_OPEN
        if self.training or self.control.training:
            return Execution.GATED
        return choose_execution(self.cct_execution, GatedParts(gates, self.part_cost))

    def split(self, activation: Tensor, gates: Tensor) -> Tensor:
        """Gate the M slices of a hidden activation `[B, T, ff]`.

        `W2 (g * act(W1 x))` is the gated sum of the parts that share the layer's matrices; its bias
        is not gated. This is the form without extra LayerNorms.
        """
        gates = self.ranks.slices(gates)
        parts = torch.unflatten(activation, -1, (gates.shape[-1], -1))
        return (parts * gates.unsqueeze(-1).to(parts.dtype)).flatten(-2)

    def compute(
        self,
        x: Tensor,
        padding_mask: Tensor | None,
        *,
        up: Sequence[nn.Module],
        activation: Callable[..., Tensor],
        down: nn.Module,
        budget: Budget | None = None,
    ) -> tuple[Tensor, Record]:
        """A dense layer with its slices gated; see `feed_forward.layers.gated_dense`."""
        gates, record = self(x, padding_mask, budget)
        execution = self.choose_execution(gates, budget)
        all_open = execution is Execution.ALL_OPEN
        if not all_open and computes_open_slices(self, x, gates, up, down):
            return open_slices(x, gates, up=up, activation=activation, down=down), record
        if execution is Execution.SUBSET:
            if is_plain(down) and all(map(is_plain, up)):
                return sparse_slices(x, gates, up=up, activation=activation, down=down), record
            if isinstance(self.ranks, TensorRanks) and all(map(is_only_split, (*up, down))):
                output = sparse_slices_of_ranks(
                    x, gates, self.ranks, up=up, activation=activation, down=down
                )
                return output, record
        hidden = activation(*(matrix(x) for matrix in up))
        return down(hidden if all_open else self.split(hidden, gates)), record

    def count_macs(self, x: Tensor, *args: object, **kwargs: object) -> Macs:
        return Macs(0, 0, x.shape[:-1].numel() * self.num_splits * self.part_cost)


class GatedFeedForward(nn.Module):
    """`sum_m g_m LN_out_m(F_m(LN_in_m(x)))`, for M parts with parameters of their own.

    Args:
        parts: the M networks F_m; each maps `(x, padding_mask)` to `(y, record)`. Where each
            `computes_tokens_alone`, it can skip some.
        gate: their gates.
        hidden_size: d.
        norm: makes LN for a width.
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        gate: FeedForwardGate,
        *,
        hidden_size: int,
        norm: Callable[[int], nn.Module],
    ):
        super().__init__()
        self.computes_tokens_alone = all(part.computes_tokens_alone for part in parts)
        self.gate = gate
        self.parts = nn.ModuleList(parts)
        self.input_norms = nn.ModuleList(norm(hidden_size) for _ in parts)
        self.output_norms = nn.ModuleList(norm(hidden_size) for _ in parts)

    def forward(
        self, hidden_states: Tensor, padding_mask: Tensor | None, budget: Budget | None = None
    ) -> tuple[Tensor, Record]:
        """`[B, T, d]` -> `[B, T, d]` and the record, with the routings of parts that have experts."""
        gates, record = self.gate(hidden_states, padding_mask, budget)
        execution = self.gate.choose_execution(gates, budget)
        networks = list(zip(self.input_norms, self.parts, self.output_norms, strict=True))
        all_open = execution is Execution.ALL_OPEN
        if not all_open and computes_open_parts(self.gate, hidden_states, self.parts):
            return open_parts(hidden_states, gates, networks), record
        if execution is Execution.SUBSET and self.computes_tokens_alone:
            return sparse_parts(hidden_states, gates, networks), record
        output = torch.zeros_like(hidden_states)
        routings: tuple = ()
        for m, (input_norm, part, output_norm) in enumerate(networks):
            y, part_record = part(input_norm(hidden_states), padding_mask)
            y = output_norm(y)
            if not all_open:
                y = y * gates[..., m : m + 1].to(y.dtype)
            output = output + y
            routings += part_record.routings
        return output, record._replace(routings=routings)
