"""A bias on the scores for each distance between a query and a key (Raffel et al. 2020, section 2.1)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.models.t5.modeling_t5 import T5Attention


def relative_position_bias(
    table: nn.Embedding,
    num_queries: int,
    num_keys: int,
    *,
    device: torch.device,
    past: int = 0,
    is_causal: bool = False,
    max_distance: int = 128,
) -> Tensor:
    """`[1, heads, T, S]` of a table `[buckets, heads]`.

    Args:
        table: of T5's buckets: half of them for single distances, the others for ever wider ranges.
        num_queries, num_keys: T and S, whose first is at position 0.
        device: where the table is when it is called.
        past: position of the first query.
        is_causal: all buckets are for keys before the query; else half of them for those after it.
        max_distance: from here on all distances share a bucket.
    """
    query = torch.arange(num_queries, device=device)[:, None] + past
    key = torch.arange(num_keys, device=device)[None, :]
    bucket = T5Attention._relative_position_bucket(
        key - query,
        bidirectional=not is_causal,
        num_buckets=table.num_embeddings,
        max_distance=max_distance,
    )
    # shape: (T, S, heads) -> (1, heads, T, S)
    return table(bucket).permute(2, 0, 1).unsqueeze(0)
