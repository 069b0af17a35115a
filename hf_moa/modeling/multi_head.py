"""The mixture that mixes nothing: plain multi-head attention."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class MultiHead(nn.Module):
    """h heads, concatenated.

    The three methods are what `GatedAttention` asks of every mixture: `route` decides, `query` makes
    the heads' queries, `output` makes the layer's output of the heads' contexts.

    Args:
        num_heads: h.
        head_dim: dh.
    """

    def __init__(self, *, num_heads: int, head_dim: int):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = head_dim

    def route(
        self, hidden_states: Tensor, padding_mask: Tensor | None, history: Tensor | None = None
    ) -> tuple[Any, dict]:
        """The decision for `[B, T, d]` (nothing here), and a record of named tensors."""
        return None, {}

    def query(self, linear: nn.Module, hidden_states: Tensor, mix: Any) -> Tensor:
        """`[B, T, d]` -> `[B, T, h, dh]`."""
        return linear(hidden_states).unflatten(-1, (self.num_heads, self.head_dim))

    def output(self, linear: nn.Module, context: Tensor, mix: Any) -> Tensor:
        """`[B, T, h, dh]` -> `[B, T, d]`."""
        return linear(context.flatten(-2))
