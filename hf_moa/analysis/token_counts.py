"""How often tokens go with experts, and which tokens are telling of an expert."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class TokenExpertCounts:
    """How often each token of the vocabulary was assigned to each expert.

    Args:
        num_experts: E.

    Attributes:
        counts: `[V, E]` float64; V grows with the largest id that was seen.
    """

    def __init__(self, num_experts: int):
        self.num_experts = num_experts
        self.counts = torch.zeros(0, num_experts, dtype=torch.float64)

    def add(self, ids: Tensor, experts: Tensor) -> None:
        """Count tokens `[n]` with their experts, `[n]` or, of k experts each, `[n, k]`."""
        if len(ids) == 0:
            return
        experts = experts.view(len(ids), -1)
        pairs = (ids.unsqueeze(1) * self.num_experts + experts).flatten().cpu()
        size = max(len(self.counts), int(ids.max()) + 1)
        new = torch.bincount(pairs, minlength=size * self.num_experts).view(size, -1)
        self.counts = torch.cat(
            [self.counts, self.counts.new_zeros(size - len(self.counts), new.shape[1])]
        )
        self.counts += new

    def pointwise_mutual_information(self) -> Tensor:
        """`[V, E]`: `log p(token, expert) / (p(token) p(expert))` (Church and Hanks 1990), in nats.

        `-inf` where the two never met, NaN where one of them was never seen.
        """
        total = self.counts.sum()
        joint = self.counts / total
        return (joint / (joint.sum(dim=1, keepdim=True) * joint.sum(dim=0, keepdim=True))).log()

    def indicative_tokens(
        self, *, least_count: int, most: int, without: Sequence[int] = ()
    ) -> list[list[tuple[int, float, int]]]:
        """The tokens with the highest PMI with each expert (Peng et al. 2020, table 6).

        Args:
            least_count: assignments that a token must have in all: of rarer ones PMI says little.
            most: tokens for each expert.
            without: ids to leave out, such as special tokens.

        Returns:
            For each expert `(id, PMI, assignments to this expert)`, highest PMI first; PMI is above
            zero.
        """
        if not len(self.counts):
            return [[] for _ in range(self.num_experts)]
        pmi = self.pointwise_mutual_information()
        pmi[self.counts.sum(dim=1) < least_count] = float("nan")
        pmi[[token for token in without if token < len(pmi)]] = float("nan")
        pmi = pmi.nan_to_num(nan=-torch.inf)
        values, tokens = pmi.topk(min(most, len(pmi)), dim=0)
        return [
            [
                (token, value, int(self.counts[token, expert]))
                for token, value in zip(
                    tokens[:, expert].tolist(), values[:, expert].tolist(), strict=True
                )
                if value > 0
            ]
            for expert in range(self.num_experts)
        ]
