"""What model cards say of CCT."""

from __future__ import annotations

from typing import Any

PHRASE = "whose layers skip computation to meet a budget chosen per call (CCT)"

_BAPNA = """@article{bapna-etal-2020-controlling,
  title = {Controlling Computation versus Quality for Neural Sequence Models},
  author = {Bapna, Ankur and Arivazhagan, Naveen and Firat, Orhan},
  journal = {arXiv preprint arXiv:2002.07106},
  year = {2020}
}"""


def in_words(config: Any) -> str:
    return (
        "**CCT** (Bapna et al. 2020). Gates decide for each token what a layer computes: its key and "
        f"value, its attention, and each of {config.cct_num_ffn_splits} parts of the feed-forward "
        "layer. The call chooses a budget, the share of that computation to aim at; the model was "
        f"trained for {_distinct(config.cct_budgets)}. Without a choice it takes the largest."
        + (" At 1 it has no gates: it is a plain model." if config.cct_full_budget_is_plain else "")
    )


def citations(config: Any) -> list[str]:
    return [_BAPNA]


def _distinct(budgets: list) -> str:
    pairs = [tuple(b) if isinstance(b, (list, tuple)) else b for b in budgets]
    return ", ".join(map(str, dict.fromkeys(pairs)))
