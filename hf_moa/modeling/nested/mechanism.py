"""What nested budgets declare: their configuration fields and their rules."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ..core.fields import fail, is_budget
from ..core.mechanism import Mechanism
from .shapes import num_layers_of, shapes_of


@dataclass(kw_only=True, repr=False)
class NestedFields:
    """Configuration fields of nested budgets.

    Args:
        nested_budgets (`list[float]` or `None`, defaults to `None`):
            Compute budgets, decreasing from 1. At each one the model is a smaller one inside itself: the
            first heads and feed-forward neurons of every layer (Hou et al. 2020, Devvrit et al. 2023). A
            budget is the share of the layers' matrices that is used. `None` switches nested budgets off.
        nested_heads (`list[int]` or `None`, defaults to `None`):
            Heads at each budget. `None`: the budget's share of them, rounded.
        nested_ffn_sizes (`list[int]` or `None`, defaults to `None`):
            Feed-forward neurons at each budget. `None`: the budget's share, rounded to a multiple of 64
            where the layer's width is one and at least 512 (of 8 where it is at least 64).
        nested_layers (`list[int]` or `None`, defaults to `None`):
            Layers at each budget, evenly spaced from the first on. `None`: all of them. Where it drops
            some, the shares that the other two take by default are larger.
    """

    nested_budgets: list | None = None
    nested_heads: list | None = None
    nested_ffn_sizes: list | None = None
    nested_layers: list | None = None


def _check_nested(config: Any) -> None:
    if not NESTED.is_on(config):
        return
    budgets = config.nested_budgets
    valid = isinstance(budgets, (list, tuple)) and len(budgets) > 0 and all(map(is_budget, budgets))
    if not valid or budgets[0] != 1 or any(a <= b for a, b in pairwise(budgets)):
        fail(config, "nested_budgets", "must be a list of decreasing numbers in (0, 1], the first 1")
    sizes = {
        "nested_heads": config.num_attention_heads,
        "nested_ffn_sizes": config.ffn_size,
        "nested_layers": num_layers_of(config),
    }
    for name, most in sizes.items():
        _check_sizes(config, name, most)
    if config.nested_layers is not None and getattr(config, "num_decoder_layers", None) not in (
        None,
        config.num_hidden_layers,
    ):
        fail(config, "nested_layers", "must be None where encoder and decoder have not as many layers")
    others = {
        "attention_type": config.attention_type == "moa",
        "ffn_type": config.ffn_type != "dense",
        "cct_budgets": config.cct_budgets is not None,
    }
    for name, is_in_the_way in others.items():
        if is_in_the_way:
            fail(
                config,
                "nested_budgets",
                "must be None with MoA, sparse MoE or CCT, whose layers are no nested slices; here "
                f"{name} is {getattr(config, name)!r}",
            )
    if all(shape == shapes_of(config)[0] for shape in shapes_of(config)) and len(budgets) > 1:
        fail(config, "nested_budgets", "must differ in heads, neurons or layers; in this model none do")


def _check_sizes(config: Any, name: str, most: int) -> None:
    sizes, number = getattr(config, name), len(config.nested_budgets)
    if sizes is None:
        return
    valid = isinstance(sizes, (list, tuple)) and len(sizes) == number
    valid = valid and all(isinstance(s, int) and not isinstance(s, bool) and s > 0 for s in sizes)
    if not valid or sizes[0] != most or any(a < b for a, b in pairwise(sizes)):
        fail(
            config,
            name,
            f"must be None or {number} integers, one for each of nested_budgets, the first {most} and "
            "none larger than the one before",
        )


NESTED = Mechanism(
    name="nested",
    fields=NestedFields,
    prefixes=("nested_",),
    is_on=lambda config: config.nested_budgets is not None,
    check=_check_nested,
    code=("nested/gating.py", "nested/totals.py"),
    package=__package__,
)
