"""The mixture that mixes nothing: plain multi-head attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..cache.gate_states import GatePast
from ..cct.token_subset import TokenRows


class MultiHead(nn.Module):
    """h heads, concatenated.

    Its members are what `GatedAttention` asks of every mixture: `route` decides, `take` is the decision
    for some of the tokens (`no_mix` for one without a context), `query` makes the heads' queries,
    `position_bias` the bias of their scores, `output` the layer's output of their contexts; `remembers`
    says whether `route` needs something of earlier tokens, `window` of how many.

    Args:
        num_heads: h.
        head_dim: dh.
    """

    def __init__(self, *, num_heads: int, head_dim: int):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = head_dim

    remembers = False
    window: int | None = None

    def route(
        self, hidden_states: Tensor, padding_mask: Tensor | None, past: GatePast | None = None
    ) -> tuple[Any, dict]:
        """The decision for `[B, T, d]` (nothing here), and a record of named tensors."""
        return None, {}

    def take(self, mix: Any, rows: TokenRows) -> Any:
        """The decision for some of the tokens, as if they were a batch `[1, n, d]`."""
        return mix

    def no_mix(self, mix: Any) -> Any:
        """A decision for one token whose context is zero, `[1, 1, h, dh]`."""
        return None

    def query(self, linear: nn.Module, hidden_states: Tensor, mix: Any) -> Tensor:
        """`[B, T, d]` -> `[B, T, h, dh]`."""
        return torch.unflatten(linear(hidden_states), -1, (self.num_heads, self.head_dim))

    def position_bias(self, bias: Tensor, mix: Any) -> Tensor:
        """`[1, h, T, S]`, one bias per head, unchanged."""
        return bias

    def output(self, linear: nn.Module, context: Tensor, mix: Any) -> Tensor:
        """`[B, T, h, dh]` -> `[B, T, d]`."""
        return linear(context.flatten(-2))
