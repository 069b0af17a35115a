"""How an upcycled model's gates are set, where nothing else is asked for."""

from __future__ import annotations

from typing import Any

from .mechanism import has_full_budget


def default_fields(given: dict[str, Any], source: Any) -> dict[str, Any]:
    """Fields with which a pretrained model, finetuned shortly, keeps to its budgets and loses least.

    Gates of a pretrained model start open, far from deciding. A budget reaches them by a bias, not by
    symbols, which are added to embeddings that the model knows; they decide in training as in eval; the
    noise is small; and a budget of 1 is the pretrained model itself, which is finetuned beside.

    Args:
        given: the fields that are asked for.
        source: the configuration of the pretrained model.

    Returns:
        An empty dict where no `cct_budgets` are asked for.
    """
    if given.get("cct_budgets") is None:
        return {}
    has_bias = given.get("cct_budget_bias", True)
    return {
        "cct_sublayer_norm": False,
        "cct_budget_bias": True,
        "cct_control_symbols": not has_bias,
        "cct_gate_training": "hard",
        "cct_full_budget_is_plain": has_full_budget(given["cct_budgets"]),
        "cct_noise_max": 1.0,
    }
