"""What CCT's gates cost, and the loss that holds the cost to the budget (Bapna et al. 2020).

Costs are multiply-accumulates of what the gates can skip: the layer's real projections and the
attention over the keys that are visible and not skipped. Control networks, norms, embeddings and
heads are always computed and stand outside. Padding is never counted.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.budgets import made_on
from ..core.precision import at_least_float32
from ..core.records import LayerRecord
from ..core.slots import TOTALS
from ..core.totals import Call, Totals, total


class AttentionCost(NamedTuple):
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
        """Cost of each query, used and full: `[..., T, 2]`.

        Args:
            query: `[..., T, 2]`, gates of the queries (see `used_and_full`).
            keys: `[..., T, 2]` or `[..., 1, 2]`, how many keys a query attends to: a sum of their gates.
        """
        return query * (self.query + self.pair * keys)


class AttentionUse(NamedTuple):
    """What one call of an attention layer makes use of; or of several such layers, stacked in front.

    Attributes:
        cost: of a token and a key.
        is_causal: whether queries see no later key.
        query: `[..., B, T]`, gates.
        kv: `[..., B, S]`, gates of the keys that this call projects; None where all are cached.
        past: `[..., B, 2]`, number of the cached keys (see `used_and_full`); None for none. Not both are
            None.
        mask, kv_mask: `[B, T]` and `[B, S]` bool, real tokens; None for all.
    """

    cost: AttentionCost
    is_causal: bool
    query: Tensor
    kv: Tensor | None
    past: Tensor | None
    mask: Tensor | None
    kv_mask: Tensor | None

    @property
    def differ_by_layer(self) -> tuple[str, ...]:
        return ("query", "kv", "past")

    @property
    def kind(self) -> tuple:
        """What layers have in common that are counted at once."""
        is_one_token = self.query.shape[-1] == 1  # the last layer may compute one only
        return (*self.cost, is_one_token, self.is_causal, self.kv is None, self.past is None)

    def per_sequence(self) -> Tensor:
        """Cost of each sequence, used and full: `[..., B, 2]`."""
        query = used_and_full(self.query, self.mask)
        past = None if self.past is None else self.past.unsqueeze(-2)
        if self.kv is None:
            held: Any = past  # where no keys are projected, there are some
            return self.cost.per_query(query, held).sum(dim=-2)
        kv = used_and_full(self.kv, self.kv_mask)
        keys = kv.cumsum(dim=-2) if self.is_causal else kv.sum(dim=-2, keepdim=True)
        projected = keys[..., -1, :]
        keys = keys if past is None else keys + past
        return self.cost.per_query(query, keys).sum(dim=-2) + self.cost.kv * projected


class FeedForwardUse(NamedTuple):
    """What one call of a feed-forward layer makes use of; or of several such layers, stacked in front.

    Attributes:
        part_cost: multiply-accumulates of one part for one token.
        gates: `[..., B, T, M]`.
        mask: `[B, T]` bool, real tokens; None for all.
    """

    part_cost: int
    gates: Tensor
    mask: Tensor | None

    @property
    def differ_by_layer(self) -> tuple[str, ...]:
        return ("gates",)

    @property
    def kind(self) -> tuple:
        """See `AttentionUse.kind`."""
        return (self.part_cost, self.gates.shape[-2] == 1)

    def per_sequence(self) -> Tensor:
        """Cost of each sequence, used and full: `[..., B, 2]`."""
        share = used_and_full(at_least_float32(self.gates).mean(dim=-1), self.mask)
        return share.sum(dim=-2) * (self.part_cost * self.gates.shape[-1])


def costs_by_kind(records: list[LayerRecord]) -> list[Tensor]:
    """Cost of each sequence, used and full, of all layers' attention, feed-forward, ...: `[B, 2]` each.

    Layers that differ only in their gates are counted at once: many small operators would cost more
    than CCT saves in a short text.

    Args:
        records: one per layer, with the use of each sub-layer.
    """
    kinds: dict[tuple, list[AttentionUse | FeedForwardUse]] = {}
    for layer in records:
        for name, record in layer.parts.items():
            kinds.setdefault((name, *record.use.kind), []).append(record.use)
    return [_stacked_uses(uses).per_sequence().sum(dim=0) for uses in kinds.values()]


def _stacked_uses(uses: list[AttentionUse | FeedForwardUse]) -> AttentionUse | FeedForwardUse:
    """Those of several layers as one, on the device of the last."""
    last = uses[-1]
    names = [name for name in last.differ_by_layer if getattr(last, name) is not None]
    device = getattr(last, names[0]).device
    stacked: dict[str, Any] = {
        name: torch.stack([getattr(use, name).to(device) for use in uses]) for name in names
    }
    return last._replace(**stacked)


def used_and_full(gates: Tensor, mask: Tensor | None) -> Tensor:
    """Gates `[..., B, T]`, and all of them open: `[..., B, T, 2]`, in float32 at least, 0 for padding.

    Args:
        mask: `[B, T]` bool, real tokens; None for all.
    """
    gates = at_least_float32(gates)
    both = torch.stack([gates, torch.ones_like(gates)], dim=-1)
    return both if mask is None else both * mask.unsqueeze(-1)


def compute_fraction(cost: Tensor) -> Tensor:
    """Used / full of a cost `[B, 2]`, `[B]`; 1 for a sequence without tokens."""
    used, full = cost.unbind(dim=-1)
    return torch.where(full > 0, used / full.clamp(min=1), 1.0)


def budget_loss(
    cost: Tensor, *, index: Tensor, budgets: list[float], chances: list[float] | None = None
) -> Tensor:
    """The sum over budgets of `|C_budget - C_util| / C_budget` (Bapna et al. 2020), estimated from a
    batch; without `chances` the mean over budgets as they are drawn.

    The sequences that drew the same budget form a group: `C_util` is what the group used, `C_budget`
    its budget times the group's full cost. A group weighs as its share of the sequences, divided by the
    chance of its budget: where a budget's sequences are alike, the expected value over draws is the sum.

    Args:
        cost: `[B, 2]`, of each sequence: used, and with all gates open.
        index: `[B]` int64, the budget of each sequence.
        budgets: the distinct budgets that `index` points into.
        chances: of each to be drawn by a sequence; None for the mean.

    Returns:
        A scalar.
    """
    used, full = cost.unbind(dim=-1)
    member = torch.nn.functional.one_hot(index, len(budgets)).to(used.dtype)  # [B, budgets]

    def per_group(cost: Tensor) -> Tensor:
        # no matrix product: autocast would take the large numbers to half precision
        return (cost.unsqueeze(-1) * member).sum(dim=0)

    group_full = per_group(full)
    target = group_full * made_on(used.device, budgets, used.dtype)
    excess = (per_group(used) - target).abs() / target.clamp(min=1)
    weight = member.mean(dim=0)
    if chances is not None:
        weight = weight / made_on(used.device, chances, used.dtype)
    return (weight * excess * (group_full > 0)).sum()


@TOTALS.filled_by("cct")
def cct_totals(records: list[LayerRecord], call: Call) -> Totals:
    """The budget loss and the compute of all layers, and with `output_cct_gates` their gates."""
    cost = total(costs_by_kind(records))
    index, values = call.budget.index.to(cost.device), call.control.values
    fields: dict[str, Any] = {
        "budget": made_on(cost.device, values, cost.dtype)[index],
        "compute_cost": cost.detach(),
        "compute_fraction": compute_fraction(cost).detach(),
    }
    if call.requested["cct_gates"]:
        fields["cct_gates"] = tuple(map(_gates, records))
    is_sum = call.config.cct_budget_loss == "sum"
    chances = call.control.chances if is_sum else None
    loss = budget_loss(cost, index=index, budgets=values, chances=chances)
    coefficient = call.config.cct_budget_loss_coef
    if coefficient is None:
        coefficient = 1 / len(values) if is_sum else 1.0
    return Totals({"budget_loss": (coefficient, loss)}, fields)


def _gates(layer: LayerRecord) -> dict[str, Tensor]:
    attention, cross = layer.attention.use, layer.cross_attention
    gates = {"kv": attention.kv, "query": attention.query, "ffn": layer.feed_forward.use.gates}
    if cross is not None:
        gates |= {"cross_kv": cross.use.kv, "cross_query": cross.use.query}
    return {name: gate for name, gate in gates.items() if gate is not None}
