"""What model cards say of sparse MoE."""

from __future__ import annotations

from typing import Any

from ..routing.card import SHAZEER

PHRASE = "whose feed-forward layers send each token to some of their experts (sparse MoE)"


def in_words(config: Any) -> str:
    return (
        f"**Sparse MoE** (Shazeer et al. 2017). A router sends each token to "
        f"{config.num_ffn_experts_per_token} of the {config.num_ffn_experts} feed-forward experts of a "
        "layer."
    )


def citations(config: Any) -> list[str]:
    return [SHAZEER]
