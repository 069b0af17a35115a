"""What CCT's gates cost, and the loss that holds the cost to the budget (Bapna et al. 2020).

Costs are multiply-accumulates of what the gates can skip: the layer's real projections and the
attention over the keys that are visible and not skipped. Control networks, norms, embeddings and
heads are always computed and stand outside. Padding is never counted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .precision import at_least_float32


@dataclass(frozen=True)
class AttentionCost:
    """Multiply-accumulates of one attention layer.

    Attributes:
        kv: key and value projections of a token.
        query: query and output projections of a token.
        pair: scores and weighted values of one query with one key, over all heads.
    """

    kv: int
    query: int
    pair: int

    @classmethod
    def of(cls, *, hidden_size: int, num_heads: int, num_kv_heads: int, head_dim: int) -> AttentionCost:
        return cls(
            kv=2 * hidden_size * num_kv_heads * head_dim,
            query=2 * hidden_size * num_heads * head_dim,
            pair=2 * num_heads * head_dim,
        )

    def per_query(self, query: Tensor, keys: Tensor) -> Tensor:
        """Cost of each query, used and full: `[B, T, 2]`.

        Args:
            query: `[B, T, 2]`, gates of the queries (see `used_and_full`).
            keys: `[B, T, 2]` or `[B, 1, 2]`, how many keys a query attends to: a sum of their gates.
        """
        return query * (self.query + self.pair * keys)

    def per_sequence(self, *, query: Tensor, kv: Tensor | None, keys: Tensor) -> Tensor:
        """Cost of each sequence, used and full: `[B, 2]`.

        Args:
            query, keys: as of `per_query`.
            kv: `[B, S, 2]`, gates of the keys projected in this call; None where there are none.
        """
        cost = self.per_query(query, keys).sum(dim=1)
        return cost if kv is None else cost + self.kv * kv.sum(dim=1)


def used_and_full(gates: Tensor, mask: Tensor | None) -> Tensor:
    """Gates `[B, T]`, and all of them open: `[B, T, 2]`, in float32 at least, 0 for padding.

    Args:
        mask: `[B, T]` bool, real tokens; None for all.
    """
    gates = at_least_float32(gates)
    both = torch.stack([gates, torch.ones_like(gates)], dim=-1)
    return both if mask is None else both * mask.unsqueeze(-1)


def feed_forward_cost(gates: Tensor, mask: Tensor | None, *, part: int) -> Tensor:
    """Cost of a feed-forward layer for each sequence, used and full: `[B, 2]`.

    Args:
        gates: `[B, T, M]`.
        mask: `[B, T]` bool, real tokens; None for all.
        part: multiply-accumulates of one part for one token.
    """
    share = used_and_full(at_least_float32(gates).mean(dim=-1), mask)
    return share.sum(dim=1) * part * gates.shape[-1]


def compute_fraction(cost: Tensor) -> Tensor:
    """Used / full of a cost `[B, 2]`, `[B]`; 1 for a sequence without tokens."""
    used, full = cost.unbind(dim=-1)
    return torch.where(full > 0, used / full.clamp(min=1), 1.0)


def budget_loss(cost: Tensor, *, index: Tensor, budgets: list[float]) -> Tensor:
    """`|C_budget - C_util| / C_budget` (Bapna et al. 2020) for each budget in the batch.

    The sequences that drew the same budget form a group: `C_util` is what the group used,
    `C_budget` its budget times the group's full cost. Groups are weighted by their share of the
    sequences.

    Args:
        cost: `[B, 2]`, of each sequence: used, and with all gates open.
        index: `[B]` int64, the budget of each sequence.
        budgets: the distinct budgets that `index` points into.

    Returns:
        A scalar.
    """
    used, full = cost.unbind(dim=-1)
    member = torch.nn.functional.one_hot(index, len(budgets)).to(used.dtype)  # [B, budgets]

    def per_group(cost: Tensor) -> Tensor:
        # no matrix product: autocast would take the large numbers to half precision
        return (cost.unsqueeze(-1) * member).sum(dim=0)

    group_full = per_group(full)
    target = group_full * torch.tensor(budgets, dtype=used.dtype, device=used.device)
    excess = (per_group(used) - target).abs() / target.clamp(min=1)
    share = member.mean(dim=0)
    return (share * excess * (group_full > 0)).sum()
