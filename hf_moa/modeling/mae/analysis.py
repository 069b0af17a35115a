"""Which experts MAE's gates weigh: entropies, attribution, and what the inputs have in common."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from hf_moa.analysis.measure import Measure
from hf_moa.analysis.observe import Observation, mixtures_by_part
from hf_moa.analysis.token_counts import TokenExpertCounts
from hf_moa.analysis.vocabulary import Vocabulary

from .mixture import MixtureOfHeads
from .report import SECTIONS


class _Layer:
    """Sums over the inputs of one MAE layer."""

    def __init__(self, mixture: Any):  # a `MixtureOfHeads`, perhaps of a checkpoint's code
        dropped = combinations(range(mixture.num_heads), mixture.num_dropped)
        self.experts = [",".join(map(str, heads)) for heads in dropped]
        self.inputs = 0
        self.entropy = 0.0
        self.weight = torch.zeros(len(self.experts), dtype=torch.float64)
        self.attributed = torch.zeros(len(self.experts), dtype=torch.float64)
        self.tokens = TokenExpertCounts(len(self.experts))

    def add(self, weights: Tensor) -> Tensor:
        """Count gates `[n, E]` and return the expert that each input is attributed to, `[n]`."""
        weights = weights.cpu().double()
        expert = weights.argmax(dim=-1)
        self.inputs += len(weights)
        self.entropy += torch.special.entr(weights).sum().item()
        self.weight += weights.sum(dim=0)
        largest = (weights == weights.amax(dim=-1, keepdim=True)).double()
        self.attributed += (largest / largest.sum(dim=-1, keepdim=True)).sum(
            dim=0
        )  # ties in equal parts
        return expert


class MaeMeasure(Measure):
    """Peng et al. 2020, section 5.1, measured over a stream of calls.

    An input of a bidirectional layer is a sequence; of a causal one (and of cross-attention) a position,
    for what precedes it. It is attributed to the expert with the largest gate; so are the tokens of a
    sequence. Experts are named by the heads that they drop.

    Args:
        model: with MAE attention.
        vocabulary: names of tokens.
        least_count, top_tokens: of `TokenExpertCounts.indicative_tokens`.
    """

    sections = SECTIONS

    def __init__(
        self, model: nn.Module, vocabulary: Vocabulary, *, least_count: int = 10, top_tokens: int = 10
    ):
        super().__init__(model, vocabulary, least_count=least_count, top_tokens=top_tokens)
        self.layers = {
            part: [_Layer(mixture) for mixture in mixtures]
            for part, mixtures in mixtures_by_part(model, MixtureOfHeads).items()
        }

    def update(self, observation: Observation) -> None:
        for part, weights in observation.expert_weights.items():
            tokens = observation.tokens_of(part)
            for layer, gate in zip(self.layers[part], weights, strict=True):
                if gate.ndim == 3:  # one for each position
                    expert = layer.add(gate[tokens.mask])
                else:
                    counted = tokens.mask.any(dim=1)
                    chosen = torch.zeros(len(gate), dtype=torch.long)
                    chosen[counted.cpu()] = layer.add(gate[counted])
                    expert = chosen.unsqueeze(1).expand(tokens.ids.shape)[tokens.mask.cpu()]
                layer.tokens.add(tokens.ids[tokens.mask].cpu(), expert)

    def tables(self) -> dict[str, pd.DataFrame]:
        """`mae_entropy`, `mae_experts` and `mae_indicative_tokens`.

        Raises:
            ValueError: nothing was measured.
        """
        entropies, experts, tokens = [], [], []
        for part, layers in self.layers.items():
            for index, layer in enumerate(layers):
                place = {"part": part, "layer": index}
                if not layer.inputs:
                    continue
                entropies.append(
                    place
                    | {
                        "inputs": layer.inputs,
                        "entropy": layer.entropy / layer.inputs,
                        "uniform": math.log(len(layer.experts)),
                    }
                )
                experts += self._experts(place, layer)
                tokens += self._tokens(place, layer)
        if not entropies:
            raise ValueError("batches must hold at least one real token (got none).")
        return {
            "mae_entropy": pd.DataFrame(entropies),
            "mae_experts": pd.DataFrame(experts),
            "mae_indicative_tokens": pd.DataFrame(
                tokens, columns=["part", "layer", "expert", "drops heads", "token", "pmi", "count"]
            ),
        }

    def facts(self, tables: dict[str, pd.DataFrame]) -> dict[str, Any]:
        return {"mean gate entropy": float(tables["mae_entropy"]["entropy"].mean())}

    @staticmethod
    def _experts(place: dict[str, Any], layer: _Layer) -> list[dict[str, Any]]:
        shares, weights = (x / layer.inputs for x in (layer.attributed, layer.weight))
        return [
            place
            | {
                "expert": expert,
                "drops heads": name,
                "share": shares[expert].item(),
                "mean weight": weights[expert].item(),
            }
            for expert, name in enumerate(layer.experts)
        ]

    def _tokens(self, place: dict[str, Any], layer: _Layer) -> list[dict[str, Any]]:
        found = layer.tokens.indicative_tokens(
            least_count=self.least_count, most=self.top_tokens, without=self.vocabulary.special_ids
        )
        return [
            place
            | {
                "expert": expert,
                "drops heads": layer.experts[expert],
                "token": self.vocabulary.name(token),
                "pmi": pmi,
                "count": count,
            }
            for expert, tokens in enumerate(found)
            for token, pmi, count in tokens
        ]


MEASURES = (MaeMeasure,)
