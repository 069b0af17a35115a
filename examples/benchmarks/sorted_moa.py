"""The algorithm of MoA's published code (a fairseq fork), as a peer to compare with.

The rows of all experts are gathered into one buffer `[tokens * k, d]`, multiplied expert by expert, and
concatenated; outputs are weighted at width d before they are added up.
"""

import torch
from torch import Tensor, nn


class SortedMoaAttention(nn.Module):
    """MoA's attention layer: a router, k of N experts, one key and one value projection.

    Args:
        hidden_size: d.
        num_experts, num_selected: N and k.
        head_dim: dh.

    Shapes: `[B, T, d]` -> `[B, T, d]`.
    """

    def __init__(self, *, hidden_size: int, num_experts: int, num_selected: int, head_dim: int):
        super().__init__()
        self.num_selected, self.head_dim = num_selected, head_dim
        self.router = nn.Linear(hidden_size, num_experts, bias=False)
        self.query = nn.Parameter(0.02 * torch.randn(num_experts, hidden_size, head_dim))
        self.output = nn.Parameter(0.02 * torch.randn(num_experts, head_dim, hidden_size))
        self.key_value = nn.Linear(hidden_size, 2 * head_dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        weight, expert = self.router(x).softmax(dim=-1).topk(self.num_selected)
        weight = weight / weight.detach().sum(dim=-1, keepdim=True)
        expert = expert.flatten()
        order = expert.argsort()
        counts = expert.bincount(minlength=len(self.query)).tolist()
        token = order // self.num_selected

        rows = x.flatten(0, 1)[token]
        query = _by_expert(rows, counts, self.query)
        query = torch.zeros_like(query).index_copy(0, order, query)
        query = query.view(batch, length, self.num_selected, self.head_dim).transpose(1, 2)
        key, value = (
            y.unsqueeze(1).expand(-1, self.num_selected, -1, -1)
            for y in self.key_value(x).chunk(2, dim=-1)
        )
        context = nn.functional.scaled_dot_product_attention(query, key, value)
        context = context.transpose(1, 2).reshape(-1, self.head_dim)[order]
        rows = _by_expert(context, counts, self.output) * weight.flatten()[order].unsqueeze(-1)
        return rows.new_zeros(batch * length, width).index_add(0, token, rows).view_as(x)


def _by_expert(rows: Tensor, counts: list[int], weights: Tensor) -> Tensor:
    parts = zip(rows.split(counts), weights, strict=True)
    return torch.cat([part @ weight for part, weight in parts])
