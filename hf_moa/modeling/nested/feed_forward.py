"""The first neurons: how a nested budget computes a feed-forward layer, `W2[:, :f] act(W1[:f] x)`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from ..core.linear_slices import of_first_inputs, output_slice
from ..core.records import Record
from ..parallel.ranks import ONE_RANK, Ranks
from .budgets import NestedUse


class NestedNeurons(nn.Module):
    """What a dense feed-forward layer computes of its neurons. It has no parameters.

    Args:
        intermediate_size: of the layer.
    """

    def __init__(self, intermediate_size: int):
        super().__init__()
        self.intermediate_size = intermediate_size

    # what has a part of the neurons
    ranks: Ranks = ONE_RANK

    def spread_over(self, ranks: Ranks) -> None:
        """Compute the rank's of the neurons that a budget has."""
        self.ranks = ranks

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
        """See `feed_forward.layers.gated_dense`."""
        size = self.intermediate_size
        if budget is None or budget.neurons == size:
            before = [matrix(x) for matrix in up]
        else:
            number = self.ranks.count(budget.neurons)
            before = [output_slice(matrix, x, 0, number) for matrix in up]
        with self.ranks.own_draws(self.training):  # some activations have dropout
            hidden = activation(*before)
        if budget is not None and budget.neuron_mask is not None:
            hidden = hidden * self.ranks.part(budget.neuron_mask, -1)
        use = NestedUse((len(up) + 1) * x.shape[-1], x.shape[1], padding_mask)
        return of_first_inputs(down, hidden, self.ranks.count(size)), Record(use=use)
