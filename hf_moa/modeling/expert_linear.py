"""Linear maps that differ from expert to expert, applied to the k experts of each token.

Two maps, because attention stands between them: into the heads (`ExpertInput`) and out of them
(`ExpertOutput`). Both compute all N experts in one matrix product and keep the chosen ones: exact
in every dtype, without host synchronisation, and it compiles and exports as one graph.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ExpertInput(nn.Module):
    """`y_{t,s} = W_e x_t + b_e` for each chosen expert `e = index[t, s]`.

    Parameters: `weight` `[N, out, in]`, `bias` `[N, out]`.
    Shapes: `x` `[B, T, in]`, `index` `[B, T, k]` -> `[B, T, k, out]`.
    """

    def __init__(self, *, num_experts: int, in_features: int, out_features: int, bias: bool = True):
        super().__init__()
        self.num_experts = num_experts
        self.out_features = out_features
        self.weight = nn.Parameter(torch.empty(num_experts, out_features, in_features))
        self.bias = nn.Parameter(torch.zeros(num_experts, out_features)) if bias else None
        nn.init.normal_(self.weight, std=in_features**-0.5)

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.flatten()
        # shape: (B, T, in) -> (B, T, N * out) -> (B, T, N, out)
        every = nn.functional.linear(x, self.weight.flatten(0, 1), bias)
        every = every.unflatten(-1, (self.num_experts, self.out_features))
        chosen = index.unsqueeze(-1).expand(*index.shape, self.out_features)
        return every.gather(-2, chosen)


class ExpertOutput(nn.Module):
    """`y_t = sum_s weight_{t,s} W_e^T x_{t,s} + b` with `e = index[t, s]`; one bias on the sum.

    Parameters: `weight` `[N, in, out]`, `bias` `[out]`.
    Shapes: `x` `[B, T, k, in]`, `index` and `weight` `[B, T, k]` -> `[B, T, out]`.
    """

    def __init__(self, *, num_experts: int, in_features: int, out_features: int, bias: bool = True):
        super().__init__()
        self.num_experts = num_experts
        self.in_features = in_features
        self.weight = nn.Parameter(torch.empty(num_experts, in_features, out_features))
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None
        nn.init.normal_(self.weight, std=in_features**-0.5)

    def forward(self, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        weighted = x * weight.unsqueeze(-1).to(x.dtype)
        chosen = index.unsqueeze(-1).expand_as(weighted)
        # shape: (B, T, k, in) -> (B, T, N, in), zero where an expert was not chosen
        spread = x.new_zeros(*x.shape[:-2], self.num_experts, self.in_features)
        spread = spread.scatter(-2, chosen, weighted)
        # shape: (B, T, N * in) @ (N * in, out) -> (B, T, out)
        y = spread.flatten(-2) @ self.weight.flatten(0, 1)
        return y if self.bias is None else y + self.bias
