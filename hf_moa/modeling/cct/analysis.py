"""Where CCT spends its compute: by token, token frequency, sub-network, layer and decoding step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_moa.analysis.budget_names import budget_name
from hf_moa.analysis.measure import Measure
from hf_moa.analysis.observe import Observation, Tokens, attention_layers, part_of
from hf_moa.analysis.vocabulary import Vocabulary
from hf_moa.gated_models import is_instance_by_name

from ..core.precision import in_float64
from .costs import AttentionCost, used_and_full
from .feed_forward import FeedForwardGate
from .report import SECTIONS

_BINS = 20  # of the distribution of compute over tokens


@dataclass(frozen=True)
class _LayerCosts:
    """What a layer's sub-networks cost."""

    attention: dict[str, AttentionCost]  # "self", "cross"
    feed_forward: int

    @classmethod
    def of(cls, layer: nn.Module) -> tuple[str, _LayerCosts]:
        """Them, behind the name of the layer's stack."""
        attentions = attention_layers(layer)
        own = next(attention for attention in attentions if not attention.is_cross_attention)
        costs = {"cross" if a.is_cross_attention else "self": a.gates.cost for a in attentions}
        gate: Any = next(
            module for module in layer.modules() if is_instance_by_name(module, FeedForwardGate)
        )
        return part_of(own), cls(costs, gate.part_cost * gate.num_splits)


@dataclass
class _StackUse:
    """Sums over the tokens of one stack at one budget.

    Attributes:
        tokens: how many.
        histogram: `[_BINS]`, tokens by their share of the full compute.
        of_type: `[2, V]`, occurrences and summed shares by token id.
        open_gates, chances: layer and sub-network -> how many gates were open, of how many.
        by_step: sub-network -> `[2, T]`, open gates and gates at each position, over all layers.
    """

    tokens: int = 0
    histogram: Tensor = field(default_factory=lambda: torch.zeros(_BINS, dtype=torch.float64))
    of_type: Tensor = field(default_factory=lambda: torch.zeros(2, 0, dtype=torch.float64))
    open_gates: dict[tuple[int, str], float] = field(default_factory=lambda: defaultdict(float))
    chances: dict[tuple[int, str], int] = field(default_factory=lambda: defaultdict(int))
    by_step: dict[str, Tensor] = field(default_factory=dict)

    def add_shares(self, ids: Tensor, shares: Tensor) -> None:
        """Shares of the full compute `[n]` of tokens `[n]`."""
        self.tokens += len(ids)
        bins = (shares * _BINS).long().clamp(max=_BINS - 1)
        self.histogram += torch.bincount(bins, minlength=_BINS)
        new = torch.stack([torch.bincount(ids).double(), torch.bincount(ids, weights=shares)])
        self.of_type = _sum_padded(self.of_type, new)

    def add_gates(self, layer: int, name: str, gates: Tensor, mask: Tensor, *, steps: bool) -> None:
        """Gates `[B, T]` of a sub-network."""
        open_gates = (gates * mask).cpu().double()
        self.open_gates[layer, name] += open_gates.sum().item()
        self.chances[layer, name] += int(mask.sum())
        if steps:
            mask = mask.cpu()
            step = (mask.cumsum(dim=1) - 1)[mask]  # behind padding, if any
            new = open_gates.new_zeros(2, mask.shape[1])
            new[0].index_add_(0, step, open_gates[mask])
            new[1].index_add_(0, step, torch.ones_like(step, dtype=new.dtype))
            kind = "feed-forward" if name.startswith("ffn") else name
            self.by_step[kind] = _sum_padded(self.by_step.get(kind, new.new_zeros(2, 0)), new)


class CctMeasure(Measure):
    """Bapna et al. 2020, section 5, measured over a stream of calls at several budgets.

    A token's compute is what its gates let through in its stack, in multiply-accumulates, of what all
    would: its projections, its query's attention to the keys that are not skipped, and its parts of the
    feed-forward layers; of an encoder's tokens also their keys and values in cross-attention. Over all
    tokens this adds up to the model's `compute_cost`. (Not of a BERT or GPT-2 decoder with cross-
    attention, which is given hidden states to attend to and no tokens: there that is left out.)
    Special tokens are not among the tokens of `cct_frequency` and `cct_token_compute`.

    Args:
        model: with CCT.
        vocabulary: names of tokens.
        least_count: occurrences of the tokens that `cct_token_compute` names.
        top_tokens: how many it names, of those with the most compute and of those with the least.
        most_steps: positions that `cct_steps` goes to.
    """

    sections = SECTIONS
    at_every_budget = True

    def __init__(
        self,
        model: nn.Module,
        vocabulary: Vocabulary,
        *,
        least_count: int = 10,
        top_tokens: int = 10,
        most_steps: int = 128,
    ):
        super().__init__(model, vocabulary, least_count=least_count, top_tokens=top_tokens)
        self.most_steps = most_steps
        self.costs: dict[str, list[_LayerCosts]] = {}
        for layer in model.modules():
            if isinstance(layer, GradientCheckpointingLayer):
                stack, costs = _LayerCosts.of(layer)
                self.costs.setdefault(stack, []).append(costs)
        self.uses: dict[tuple[Any, str], _StackUse] = defaultdict(_StackUse)
        self.fractions: dict[Any, list[float]] = defaultdict(lambda: [0, 0.0])

    def update(self, observation: Observation) -> None:
        name = budget_name(observation.budget)
        if observation.compute_fraction is not None:
            self.fractions[name][0] += len(observation.compute_fraction)
            self.fractions[name][1] += in_float64(observation.compute_fraction).sum().item()
        for stack, cost in token_costs(self.costs, observation).items():
            tokens = observation.tokens[stack]
            used, full = cost[tokens.mask].cpu().unbind(dim=-1)
            self.uses[name, stack].add_shares(tokens.ids[tokens.mask].cpu(), used / full)
        for stack, layers in observation.cct_gates.items():
            for index, gates in enumerate(layers):
                for part, gate, tokens in _sub_networks(observation, stack, gates):
                    use = self.uses[name, stack]
                    steps = stack == "decoder" and part != "cross keys, values"
                    use.add_gates(index, part, gate, tokens.mask, steps=steps)

    def tables(self) -> dict[str, pd.DataFrame]:
        """`cct_compute`, `cct_distribution`, `cct_frequency`, `cct_token_compute`, `cct_activity` and,
        of decoders, `cct_steps`.

        Raises:
            ValueError: nothing was measured.
        """
        if not any(use.tokens for use in self.uses.values()):
            raise ValueError("batches must hold at least one real token (got none).")
        rows: dict[str, list[dict[str, Any]]] = {
            "cct_compute": [
                {"budget": name, "sequences": count, "compute_fraction": total / count}
                for name, (count, total) in self.fractions.items()
            ]
        }
        for (budget, stack), use in self.uses.items():
            place = {"budget": budget, "stack": stack}
            of_type = use.of_type.clone()
            of_type[:, [i for i in self.vocabulary.special_ids if i < of_type.shape[1]]] = 0
            for table, found in {
                "cct_distribution": self._distribution(use),
                "cct_frequency": self._by_frequency(of_type),
                "cct_token_compute": self._by_token(of_type),
                "cct_activity": self._activity(use),
                "cct_steps": self._steps(use),
            }.items():
                rows.setdefault(table, []).extend(place | row for row in found)
        return {name: pd.DataFrame(table) for name, table in rows.items() if table}

    @staticmethod
    def _distribution(use: _StackUse) -> Iterator[dict[str, Any]]:
        for index, count in enumerate(use.histogram.tolist()):
            yield {
                "from": index / _BINS,
                "to": (index + 1) / _BINS,
                "share of tokens": count / use.tokens,
            }

    @staticmethod
    def _by_frequency(of_type: Tensor) -> Iterator[dict[str, Any]]:
        """Token types in bins of occurrences, each twice as wide as the one before."""
        count, total = of_type
        if not count.any():  # only special tokens
            return
        size = count.log2().floor()
        for exponent in range(int(size.max()) + 1):
            types = size == exponent
            if types.any():
                yield {
                    "occurrences from": 2**exponent,
                    "to": 2 ** (exponent + 1) - 1,
                    "token types": int(types.sum()),
                    "compute": (total[types].sum() / count[types].sum()).item(),
                }

    def _by_token(self, of_type: Tensor) -> Iterator[dict[str, Any]]:
        count, total = of_type
        ids = (count >= self.least_count).nonzero().flatten()
        means = total[ids] / count[ids]
        order = means.argsort(descending=True, stable=True)
        most = min(self.top_tokens, len(ids) // 2)
        for which, chosen in (("most", order[:most]), ("least", order.flip(0)[:most])):
            for token, mean in zip(ids[chosen].tolist(), means[chosen].tolist(), strict=True):
                yield {
                    "which": which,
                    "token": self.vocabulary.name(token),
                    "count": int(count[token]),
                    "compute": mean,
                }

    @staticmethod
    def _activity(use: _StackUse) -> Iterator[dict[str, Any]]:
        for (layer, name), chances in use.chances.items():
            if chances:
                share = use.open_gates[layer, name] / chances
                yield {"layer": layer, "sub-network": name, "open": share}

    def _steps(self, use: _StackUse) -> Iterator[dict[str, Any]]:
        for name, (opened, chances) in use.by_step.items():
            for step in range(min(len(opened), self.most_steps)):
                if chances[step] > 0:
                    share = (opened[step] / chances[step]).item()
                    yield {"step": step, "sub-network": name, "open": share}


def token_costs(costs: dict[str, list[_LayerCosts]], observation: Observation) -> dict[str, Tensor]:
    """Multiply-accumulates of each token, used and full: stack -> `[B, T, 2]`, 0 for padding."""
    found: dict[str, Tensor] = {}

    def add(stack: str, cost: Tensor) -> None:
        found[stack] = found.get(stack, 0) + cost

    for stack, layers in observation.cct_gates.items():
        tokens = observation.tokens[stack]
        for gates, cost in zip(layers, costs[stack], strict=True):
            own, cross = cost.attention["self"], cost.attention.get("cross")
            query, kv, feed_forward = (
                used_and_full(in_float64(gate), tokens.mask)
                for gate in (gates["query"], gates["kv"], in_float64(gates["ffn"]).mean(dim=-1))
            )
            keys = kv.cumsum(dim=1) if stack == "decoder" else kv.sum(dim=1, keepdim=True)
            add(stack, own.per_query(query, keys) + own.kv * kv + cost.feed_forward * feed_forward)
            if cross is not None and "cross_kv" in gates and "encoder" in observation.tokens:
                keys = used_and_full(in_float64(gates["cross_kv"]), observation.tokens["encoder"].mask)
                query = used_and_full(in_float64(gates["cross_query"]), tokens.mask)
                add("encoder", cross.kv * keys)
                add(stack, cross.per_query(query, keys.sum(dim=1, keepdim=True)))
    return found


def _sub_networks(
    observation: Observation, stack: str, gates: dict[str, Tensor]
) -> Iterator[tuple[str, Tensor, Tokens]]:
    """Names of a layer's sub-networks, their gates `[B, T]`, and whose tokens these are."""
    tokens = observation.tokens[stack]
    yield "keys, values", gates["kv"], tokens
    yield "query, output", gates["query"], tokens
    if "cross_query" in gates:
        yield "cross query, output", gates["cross_query"], tokens
        if "encoder" in observation.tokens:
            yield "cross keys, values", gates["cross_kv"], observation.tokens["encoder"]
    for part, gate in enumerate(gates["ffn"].unbind(dim=-1)):
        yield f"ffn {part}", gate, tokens


def _sum_padded(one: Tensor, other: Tensor) -> Tensor:
    """The sum of `[2, n]` and `[2, m]`, the shorter one filled up with zeros."""
    size = max(one.shape[1], other.shape[1])
    first, second = (nn.functional.pad(x, (0, size - x.shape[1])) for x in (one, other))
    return first + second


MEASURES = (CctMeasure,)
