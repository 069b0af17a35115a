"""Fast forms of CCT's feed-forward layers: the tokens with open gates only, exactly as all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from ..core.linear_slices import PlainLinear, input_slice, linear_slice
from ..core.precision import compute_dtype
from ..parallel.own_linear import own_inputs, own_outputs
from ..parallel.ranks import TensorRanks
from .token_subset import TokenSubset


def sparse_slices(
    x: Tensor,
    gates: Tensor,
    *,
    up: Sequence[nn.Module],
    activation: Callable[..., Tensor],
    down: PlainLinear,
) -> Tensor:
    """`FeedForwardGate.compute`, of plain linear layers: `[B, T, d]` and gates `[B, T, M]`, zeros and
    ones -> `[B, T, d]`."""
    num_parts = gates.shape[-1]

    def parts(x: Tensor, first: int, last: int, bias: Tensor | None = None) -> Tensor:
        """What those from `first` to before `last` give."""
        hidden = activation(*(linear_slice(matrix, x, first, last, of=num_parts) for matrix in up))
        return input_slice(down, hidden, first, last, of=num_parts, bias=bias)

    if gates.numel() == num_parts:  # one token: parts side by side are one
        runs = _runs(gates.flatten().tolist())
        if runs:
            output = parts(x, *runs[0], down.bias)
            for run in runs[1:]:
                output = output + parts(x, *run)
            return output
    bias = down.weight.new_zeros(x.shape[-1]) if down.bias is None else down.bias
    output = bias.to(compute_dtype(down.weight)).repeat(*x.shape[:-1], 1)
    for m, subset in enumerate(TokenSubset.of_parts(gates > 0)):
        if len(subset):
            subset.add_to(output, parts(subset.gather(x), m, m + 1))
    return output


def sparse_slices_of_ranks(
    x: Tensor,
    gates: Tensor,
    ranks: TensorRanks,
    *,
    up: Sequence[nn.Module],
    activation: Callable[..., Tensor],
    down: Any,
) -> Tensor:
    """The same of linear layers that ranks share: each computes its own slices, and all are added."""
    of_own = sparse_slices(
        ranks.shared(x),
        ranks.slices(gates),
        up=[own_outputs(matrix, ranks) for matrix in up],
        activation=activation,
        down=own_inputs(down),
    )
    output = ranks.sum(of_own)
    return output if down.bias is None else output + down.bias.to_local()


def sparse_parts(
    x: Tensor, gates: Tensor, networks: Sequence[tuple[nn.Module, nn.Module, nn.Module]]
) -> Tensor:
    """`GatedFeedForward`, of networks `(input norm, part, output norm)`: `[B, T, d]` and gates
    `[B, T, M]` -> `[B, T, d]`."""
    output = None
    subsets = TokenSubset.of_parts(gates > 0)
    for subset, (input_norm, part, output_norm) in zip(subsets, networks, strict=True):
        if len(subset):
            y = output_norm(part(input_norm(subset.gather(x)), None)[0])
            if output is None:  # a part may compute in another dtype than its inputs'
                output = y.new_zeros(x.shape)
            subset.add_to(output, y)
    return torch.zeros_like(x) if output is None else output


def _runs(gates: Sequence[float]) -> list[tuple[int, int]]:
    """Where gates are open, first and behind the last of those side by side: [1, 1, 0, 1] ->
    [(0, 2), (3, 4)]."""
    runs = [list(run) for is_open, run in groupby(range(len(gates)), gates.__getitem__) if is_open]
    return [(run[0], run[-1] + 1) for run in runs]
