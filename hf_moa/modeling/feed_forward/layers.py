"""The feed-forward layer that a configuration asks for, for any backbone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import initialization as init

from ..core.activations import build_activation
from ..core.initialization import InitScales
from ..core.precision import in_dtype_of
from ..core.records import Record
from ..core.slots import FEED_FORWARDS, GATINGS


class SliceGate(Protocol):
    """Gates on slices of a dense layer's hidden activation."""

    def compute(
        self,
        x: Tensor,
        padding_mask: Tensor | None,
        *,
        up: Sequence[nn.Module],
        activation: Callable[..., Tensor],
        down: nn.Module,
        budget: Any = None,
    ) -> tuple[Tensor, Record]:
        """See `gated_dense`."""


class DenseFeedForward(nn.Module):
    """`W2 act(W1 x)`, or `W2 (act(W1 x) * W3 x)`: one part of a CCT feed-forward layer.

    Args:
        hidden_size, intermediate_size: d and the width of the part.
        activation: name of the activation.
        is_gated: whether there is a W3, as in T5's "gated-gelu".
        bias: whether W1 and W2 (and W3) have biases.
        dropout: on the hidden activation.

    Shapes: `[B, T, d]` -> `[B, T, d]`, and an empty record.
    """

    computes_tokens_alone = True

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

    @classmethod
    def from_config(cls, config: Any, **shape: Any) -> DenseFeedForward:
        return cls(**shape)

    def initialize(self, scales: InitScales) -> None:
        init.normal_(self.up.weight, std=scales.up)
        init.normal_(self.down.weight, std=scales.down)
        if self.linear is not None:
            init.normal_(self.linear.weight, std=scales.up)

    def forward(
        self, hidden_states: Tensor, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, Record]:
        activation = self.activation(self.up(hidden_states))
        if self.linear is not None:
            activation = activation * self.linear(hidden_states)
        return self.down(in_dtype_of(self.down, self.dropout(activation))), Record()


def build_feed_forward(
    config: Any,
    *,
    hidden_size: int,
    intermediate_size: int,
    activation: str,
    norm: Callable[[int], nn.Module],
    is_gated: bool = False,
    bias: bool = True,
    dropout: float = 0.0,
) -> nn.Module | None:
    """A module `(x, padding_mask, budget) -> (y, record)`, or None for the backbone's own dense layer.

    The backbone keeps its own where nothing but gates on its hidden activation is asked for: see
    `build_feed_forward_gate` and `gated_dense`.

    Args:
        config: a `GatingConfig`.
        norm: makes CCT's extra norms for a width, as the backbone's own are.
        hidden_size, intermediate_size, activation, is_gated, bias, dropout: of the backbone's dense
            layer; see `DenseFeedForward`.
    """
    form = {"activation": activation, "is_gated": is_gated, "bias": bias, "dropout": dropout}
    kind = FEED_FORWARDS.of(config)

    def part(width: int) -> nn.Module:
        chosen = kind or DenseFeedForward
        return chosen.from_config(config, hidden_size=hidden_size, intermediate_size=width, **form)

    gating = GATINGS.of(config)
    if gating is None:
        return None if kind is None else part(intermediate_size)
    return gating.feed_forward(
        config,
        part,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        is_gated=is_gated,
        norm=norm,
    )


def build_feed_forward_gate(
    config: Any, *, hidden_size: int, intermediate_size: int, is_gated: bool = False
) -> SliceGate | None:
    """The gates of the backbone's own dense layer; None where nothing gates it."""
    gating = GATINGS.of(config)
    if gating is None:
        return None
    return gating.feed_forward_gate(
        config, hidden_size=hidden_size, intermediate_size=intermediate_size, is_gated=is_gated
    )


def gated_dense(
    x: Tensor,
    padding_mask: Tensor | None,
    *,
    up: Sequence[nn.Module],
    activation: Callable[..., Tensor],
    down: nn.Module,
    gate: SliceGate | None,
    budget: Any = None,
) -> tuple[Tensor, Record]:
    """`down(g * activation(up_1 x, ...))` with gates g on slices of the hidden activation.

    Args:
        x: `[B, T, d]`.
        padding_mask: `[B, T]` bool, real tokens; None for all.
        up: linear layers `[B, T, d]` -> `[B, T, ff]`.
        activation: of all their outputs, to the layer's hidden activation.
        down: linear layer `[B, T, ff]` -> `[B, T, d]`.
        gate: None leaves the dense layer as it is.
        budget: the call's, for the gate; None without.

    Returns:
        `[B, T, d]` and what the gates report.
    """
    if gate is None:
        return down(activation(*(matrix(x) for matrix in up))), Record()
    return gate.compute(x, padding_mask, up=up, activation=activation, down=down, budget=budget)
