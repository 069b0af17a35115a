"""Which feed-forward layer a gating configuration asks for, for any backbone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from torch import Tensor, nn

from ..cct.feed_forward import FeedForwardGate, GatedFeedForward
from ..cct.gates import sublayer_norm
from ..cct.token_subset import Execution, TokenRows
from ..core.activations import build_activation
from ..core.linear_slices import input_slice, is_plain, linear_slice
from ..core.precision import compute_dtype, in_dtype_of
from .experts import SparseMoeFeedForward


class DenseFeedForward(nn.Module):
    """`W2 act(W1 x)`, or `W2 (act(W1 x) * W3 x)`: one part of a CCT feed-forward layer.

    Args:
        hidden_size, intermediate_size: d and the width of the part.
        activation: name of the activation.
        is_gated: whether there is a W3, as in T5's "gated-gelu".
        bias: whether W1 and W2 (and W3) have biases.
        dropout: on the hidden activation.
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        intermediate_size: int,
        activation: str,
        is_gated: bool = False,
        bias: bool = True,
        dropout: float = 0.0,
    ):
        super().__init__()
        self.up = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.linear = nn.Linear(hidden_size, intermediate_size, bias=bias) if is_gated else None
        self.activation = build_activation(activation)
        self.dropout = nn.Dropout(dropout)
        self.down = nn.Linear(intermediate_size, hidden_size, bias=bias)

    def forward(
        self, hidden_states: Tensor, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        activation = self.activation(self.up(hidden_states))
        if self.linear is not None:
            activation = activation * self.linear(hidden_states)
        return self.down(in_dtype_of(self.down, self.dropout(activation))), {}


def build_feed_forward(
    config,
    *,
    hidden_size: int,
    intermediate_size: int,
    activation: str,
    norm: Callable[[int], nn.Module],
    is_gated: bool = False,
    bias: bool = True,
    dropout: float = 0.0,
) -> nn.Module | None:
    """A module `(x, padding_mask) -> (y, record)`, or None for the backbone's own dense layer.

    The backbone keeps its own where experts and the paper's LayerNorms leave its matrices whole;
    with CCT it then gates them with `build_feed_forward_gate` and `gated_dense`.

    Args:
        config: a `GatingConfig`.
        norm: makes CCT's extra norms for a width, as the backbone's own are.
        hidden_size, intermediate_size, activation, is_gated, bias, dropout: of the backbone's dense
            layer; see `DenseFeedForward`. Experts have no dropout inside.
    """
    num_parts = config.cct_num_ffn_splits if config.has_cct else 1
    shape = {
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size // num_parts,
        "activation": activation,
        "is_gated": is_gated,
        "bias": bias,
    }

    def part() -> nn.Module:
        if config.ffn_type == "dense":
            return DenseFeedForward(dropout=dropout, **shape)
        return SparseMoeFeedForward(
            config,
            num_experts=config.num_ffn_experts,
            num_selected=config.num_ffn_experts_per_token,
            router_type=config.router_type,
            **shape,
        )

    if not config.has_cct:
        return part() if config.ffn_type == "moe" else None
    if config.ffn_type == "dense" and not config.cct_sublayer_norm:
        return None
    return GatedFeedForward(
        [part() for _ in range(num_parts)],
        _gate(config, hidden_size, intermediate_size, is_gated),
        hidden_size=hidden_size,
        norm=sublayer_norm(config, norm),
        parts_are_rowwise=config.ffn_type == "dense",
    )


def build_feed_forward_gate(
    config, *, hidden_size: int, intermediate_size: int, is_gated: bool = False
) -> FeedForwardGate | None:
    """CCT's gates of the backbone's own dense layer; None without CCT."""
    return _gate(config, hidden_size, intermediate_size, is_gated) if config.has_cct else None


def gated_dense(
    x: Tensor,
    padding_mask: Tensor | None,
    *,
    up: Sequence[nn.Module],
    activation: Callable[..., Tensor],
    down: nn.Module,
    gate: FeedForwardGate | None,
) -> tuple[Tensor, dict[str, Any]]:
    """`down(g * activation(up_1 x, ...))` with CCT's gates g on slices of the hidden activation.

    Args:
        x: `[B, T, d]`.
        padding_mask: `[B, T]` bool, real tokens; None for all.
        up: linear layers `[B, T, d]` -> `[B, T, ff]`.
        activation: of all their outputs, to the layer's hidden activation.
        down: linear layer `[B, T, ff]` -> `[B, T, d]`.
        gate: None leaves the dense layer as it is.

    Returns:
        `[B, T, d]` and the record of the gates.
    """
    if gate is None:
        return down(activation(*(matrix(x) for matrix in up))), {}
    gates, record = gate(x, padding_mask)
    execution = gate.choose_execution(gates)
    if execution is not Execution.ROWS or not all(map(is_plain, (*up, down))):
        hidden = activation(*(matrix(x) for matrix in up))
        return down(hidden if execution is Execution.OPEN else gate.split(hidden, gates)), record

    def parts(x: Tensor, first: int, last: int, bias: Tensor | None = None) -> Tensor:
        """What those from `first` to before `last` give."""
        hidden = activation(*(linear_slice(matrix, x, first, last, of=num_parts) for matrix in up))
        return input_slice(down, hidden, first, last, of=num_parts, bias=bias)

    num_parts = gates.shape[-1]
    if gates.numel() == num_parts:  # one token: parts side by side are one
        runs = _runs(gates.flatten().tolist())
        if runs:
            output = parts(x, *runs[0], down.bias)
            for run in runs[1:]:
                output = output + parts(x, *run)
            return output, record
    bias = down.weight.new_zeros(x.shape[-1]) if down.bias is None else down.bias
    output = bias.to(compute_dtype(down.weight)).repeat(*x.shape[:-1], 1)
    for m, rows in enumerate(TokenRows.of_parts(gates > 0)):
        if len(rows):
            rows.add_to(output, parts(rows.gather(x), m, m + 1))
    return output, record


def _runs(gates: Sequence[float]) -> list[tuple[int, int]]:
    """Where gates are open, first and behind the last of those side by side: [1, 1, 0, 1] ->
    [(0, 2), (3, 4)]."""
    runs = [list(run) for is_open, run in groupby(range(len(gates)), gates.__getitem__) if is_open]
    return [(run[0], run[-1] + 1) for run in runs]


def _gate(config, hidden_size: int, intermediate_size: int, is_gated: bool) -> FeedForwardGate:
    active = config.num_ffn_experts_per_token if config.ffn_type == "moe" else 1
    matrices = 3 if is_gated else 2
    num_splits = config.cct_num_ffn_splits
    return FeedForwardGate(
        hidden_size=hidden_size,
        gate_hidden_size=config.cct_gate_hidden_size,
        num_splits=num_splits,
        part_cost=matrices * hidden_size * active * (intermediate_size // num_splits),
        starts_open=not config.cct_sublayer_norm,
        execution=config.cct_execution,
    )
