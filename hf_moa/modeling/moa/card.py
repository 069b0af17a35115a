"""What model cards say of MoA."""

from __future__ import annotations

from typing import Any

PHRASE = "whose attention sends each token to some of its heads (MoA)"

_ZHANG = """@inproceedings{zhang-etal-2022-mixture,
  title = {Mixture of Attention Heads: Selecting Attention Heads Per Token},
  author = {Zhang, Xiaofeng and Shen, Yikang and Huang, Zeyu and Zhou, Jie and Rong, Wenge and
            Xiong, Zhang},
  booktitle = {Proceedings of the 2022 Conference on Empirical Methods in Natural Language Processing},
  year = {2022},
  pages = {4150--4162},
  doi = {10.18653/v1/2022.emnlp-main.278}
}"""


def in_words(config: Any) -> str:
    groups, selected = config.moa_key_value_heads, config.num_attention_heads
    shared = "one key and one value projection for all"
    chosen = f"{selected} of them"
    if groups > 1:
        shared = f"a key and a value projection for each of {groups} groups of them"
        chosen = f"{selected // groups} of each group"
    return (
        f"**MoA** (Zhang et al. 2022). An attention layer has {config.attention_experts} heads of size "
        f"{config.head_dim}, each with query and output projections of its own, and {shared}. A router "
        f"sends each token to {chosen} and weighs what they give."
    )


def shown_fields(config: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """With the number of experts also where the field leaves it to the default."""
    return fields | {"num_attention_experts": config.attention_experts}


def citations(config: Any) -> list[str]:
    return [_ZHANG]
