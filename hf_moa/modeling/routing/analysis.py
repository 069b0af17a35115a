"""Which experts the routers choose: load, certainty, company, and for which tokens.

Of MoA's attention experts everything is measured; of feed-forward experts the load.
"""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from hf_moa.analysis.measure import Measure
from hf_moa.analysis.observe import Observation, mixtures_by_part
from hf_moa.analysis.token_counts import TokenExpertCounts
from hf_moa.analysis.vocabulary import Vocabulary
from hf_moa.gated_models import is_instance_by_name

from ..core.precision import in_float64, without_autocast
from ..moa.mixture import MixtureOfAttentionExperts
from .report import SECTIONS
from .routers import TopKRouter


class _Layer:
    """Sums over the tokens of one MoA layer."""

    def __init__(self, router: TopKRouter):
        self.num_experts = router.num_experts
        self.num_selected = router.num_selected
        self.tokens = 0
        self.entropy = 0.0
        self.chosen_together = torch.zeros(self.num_experts, self.num_experts, dtype=torch.float64)
        self.counts = TokenExpertCounts(self.num_experts)

    def add(self, ids: Tensor, logits: Tensor) -> None:
        """Count tokens `[n]` and their router logits `[n, N]`."""
        probabilities = logits.softmax(dim=-1)  # as the router ranks them
        chosen = probabilities.topk(self.num_selected, dim=-1).indices
        self.tokens += len(ids)
        self.entropy += torch.special.entr(in_float64(probabilities)).sum().item()
        self.counts.add(ids.cpu(), chosen.cpu())
        rows = torch.zeros_like(probabilities, dtype=torch.float32)
        rows.scatter_(1, chosen, 1.0)
        with without_autocast(rows.device.type):  # half precision would round the counts
            self.chosen_together += (rows.T @ rows).cpu()

    @property
    def share_chosen(self) -> Tensor:
        """`[N]`, share of the tokens that chose each expert."""
        return self.chosen_together.diagonal() / self.tokens


def _router_of(mixture: nn.Module) -> TopKRouter:
    """Its router, also where an adapter has wrapped it."""
    found: Any = next(m for m in mixture.modules() if is_instance_by_name(m, TopKRouter))
    return found


class MoaMeasure(Measure):
    """Zhang et al. 2022, section 6, measured over a stream of calls.

    Args:
        model: with MoA attention or feed-forward experts.
        vocabulary: names and kinds of tokens.
        least_count, top_tokens: of `TokenExpertCounts.indicative_tokens`; `top_tokens` is also how many
            of the most frequent tokens have their preferences shown.
    """

    sections = SECTIONS

    def __init__(
        self, model: nn.Module, vocabulary: Vocabulary, *, least_count: int = 10, top_tokens: int = 10
    ):
        super().__init__(model, vocabulary, least_count=least_count, top_tokens=top_tokens)
        self.layers = {
            part: [_Layer(_router_of(mixture)) for mixture in mixtures]
            for part, mixtures in mixtures_by_part(model, MixtureOfAttentionExperts).items()
        }
        self.feed_forward: dict[str, Tensor] = {}
        self.feed_forward_tokens: dict[str, int] = {}

    def update(self, observation: Observation) -> None:
        for part, all_logits in observation.router_logits.items():
            tokens = observation.tokens_of(part)
            for layer, logits in zip(self.layers[part], all_logits, strict=True):
                layer.add(tokens.ids[tokens.mask], logits[tokens.mask])
        for name, load in observation.expert_load.items():
            stack, _, part = name.partition(" ")
            if part == "feed_forward":
                count = int(observation.tokens[stack].mask.sum())
                so_far = self.feed_forward.get(name, torch.zeros(load.shape, dtype=torch.float64))
                self.feed_forward[name] = so_far + count * load.cpu().double()
                self.feed_forward_tokens[name] = self.feed_forward_tokens.get(name, 0) + count

    def tables(self) -> dict[str, pd.DataFrame]:
        """`expert_load` and, of attention experts, `router_entropy`, `experts_together`,
        `expert_indicative_tokens`, `expert_token_preferences` and `expert_kind_preferences`.

        Raises:
            ValueError: nothing was measured.
        """
        found: dict[str, list[dict[str, Any]]] = {
            name: []
            for name in (
                "expert_load",
                "router_entropy",
                "experts_together",
                "expert_indicative_tokens",
                "expert_token_preferences",
                "expert_kind_preferences",
            )
        }
        for part, layers in self.layers.items():
            for index, layer in enumerate(layers):
                if layer.tokens:
                    place = {"part": part, "layer": index}
                    self._add_rows(found, place, layer)
        for name, load in self.feed_forward.items():
            if tokens := self.feed_forward_tokens[name]:
                for index, row in enumerate((load / tokens).tolist()):
                    place = {"part": name, "layer": index}
                    found["expert_load"] += [
                        place | {"expert": expert, "load": share} for expert, share in enumerate(row)
                    ]
        if not found["expert_load"]:
            raise ValueError("batches must hold at least one real token (got none).")
        return {name: pd.DataFrame(rows) for name, rows in found.items() if rows}

    def _add_rows(
        self, found: dict[str, list[dict[str, Any]]], place: dict[str, Any], layer: _Layer
    ) -> None:
        shares = layer.share_chosen
        found["expert_load"] += [
            place | {"expert": expert, "load": share / layer.num_selected}
            for expert, share in enumerate(shares.tolist())
        ]
        found["router_entropy"].append(
            place
            | {
                "tokens": layer.tokens,
                "entropy": layer.entropy / layer.tokens,
                "uniform": math.log(layer.num_experts),
            }
        )
        found["experts_together"] += self._pairs(place, layer, shares)
        indicative = layer.counts.indicative_tokens(
            least_count=self.least_count * layer.num_selected,  # a token's assignments
            most=self.top_tokens,
            without=self.vocabulary.special_ids,
        )
        found["expert_indicative_tokens"] += [
            place | {"expert": expert, "token": self.vocabulary.name(token), "pmi": pmi, "count": count}
            for expert, tokens in enumerate(indicative)
            for token, pmi, count in tokens
        ]
        # each token has k assignments
        per_token = layer.counts.counts / layer.num_selected
        frequent = per_token.sum(dim=1)
        frequent[[i for i in self.vocabulary.special_ids if i < len(frequent)]] = 0
        for token in frequent.topk(min(self.top_tokens, len(frequent))).indices.tolist():
            if frequent[token] > 0:
                name = {"token": self.vocabulary.name(token)}
                found["expert_token_preferences"] += _preferences(place | name, per_token[token])
        kinds: dict[str, Tensor] = {}
        for token in per_token.sum(dim=1).nonzero().flatten().tolist():
            kind = self.vocabulary.kind(token)
            kinds[kind] = kinds.get(kind, 0) + per_token[token]
        for kind, counts in sorted(kinds.items()):
            found["expert_kind_preferences"] += _preferences(place | {"kind": kind}, counts)

    @staticmethod
    def _pairs(place: dict[str, Any], layer: _Layer, shares: Tensor) -> list[dict[str, Any]]:
        """Lift is over a choice by chance of k different experts, as often each: of such a token's pairs
        there are fewer than if two experts could be the same one."""
        if layer.num_selected == 1:
            return []
        size, k = layer.num_experts, layer.num_selected
        together = layer.chosen_together / layer.tokens
        by_chance = shares.unsqueeze(0) * shares.unsqueeze(1) * (size * (k - 1)) / (k * (size - 1))
        lift = together / by_chance
        return [
            place
            | {
                "expert": one,
                "other": other,
                "tokens": int(layer.chosen_together[one, other]),
                "share": together[one, other].item(),
                "lift": lift[one, other].item(),
            }
            for one in range(layer.num_experts)
            for other in range(one + 1, layer.num_experts)
        ]


def _preferences(place: dict[str, Any], counts: Tensor) -> list[dict[str, Any]]:
    """Shares of the assignments of a token or kind, by expert; `counts` `[N]`, one token once."""
    total = counts.sum().item()
    return [
        place | {"count": round(total), "expert": expert, "share": count / total}
        for expert, count in enumerate(counts.tolist())
    ]


MEASURES = (MoaMeasure,)
