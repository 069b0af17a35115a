"""What model cards say of MAE."""

from __future__ import annotations

from math import comb
from typing import Any

PHRASE = "whose attention is a weighted mixture of subsets of its heads (MAE)"

PENG = """@inproceedings{peng-etal-2020-mixture,
  title = {A Mixture of h - 1 Heads is Better than h Heads},
  author = {Peng, Hao and Schwartz, Roy and Li, Dianqi and Smith, Noah A.},
  booktitle = {Proceedings of the 58th Annual Meeting of the Association for Computational Linguistics},
  year = {2020},
  pages = {6566--6577},
  eprint = {2005.06537},
  archivePrefix = {arXiv}
}"""


def in_words(config: Any) -> str:
    heads, dropped = config.num_attention_heads, config.mae_num_dropped_heads
    text = (
        f"**MAE** (Peng et al. 2020). An attention layer of {heads} heads is a mixture of "
        f"{comb(heads, dropped)} experts: every way to leave out {dropped} of the heads. "
    )
    if config.mae_gate_type == "uniform":
        return text + "All weigh the same (UNI-MAE), so there are no gates."
    text += (
        "A gate in each attention layer looks at the mean of the layer's inputs and weighs the experts"
    )
    return text + (
        "; where a layer is causal, it only looks back." if _has_causal_layers(config) else "."
    )


def shown_fields(config: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """Without the window of causal layers' gates, where there are none."""
    if not _has_causal_layers(config):
        fields.pop("mae_gate_window", None)
    return fields


def citations(config: Any) -> list[str]:
    return [PENG]


def _has_causal_layers(config: Any) -> bool:
    return config.model_type != "moa_bert" or config.is_decoder
