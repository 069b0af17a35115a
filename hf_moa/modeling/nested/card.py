"""What model cards say of nested budgets."""

from __future__ import annotations

from typing import Any

from .shapes import shapes_of

PHRASE = "with several sizes inside, one chosen per call (nested budgets)"

_HOU = """@inproceedings{hou-etal-2020-dynabert,
  title = {{DynaBERT}: Dynamic {BERT} with Adaptive Width and Depth},
  author = {Hou, Lu and Huang, Zhiqi and Shang, Lifeng and Jiang, Xin and Chen, Xiao and Liu, Qun},
  booktitle = {Advances in Neural Information Processing Systems},
  year = {2020}
}"""
_DEVVRIT = """@inproceedings{devvrit-etal-2024-matformer,
  title = {{MatFormer}: Nested Transformer for Elastic Inference},
  author = {Devvrit and Kudugunta, Sneha and Kusupati, Aditya and others},
  booktitle = {Advances in Neural Information Processing Systems},
  year = {2024}
}"""


def in_words(config: Any) -> str:
    sizes = "; ".join(
        f"{budget:g}: {shape.heads} heads and {shape.neurons} neurons of {len(shape.layers)} layers"
        for budget, shape in zip(config.nested_budgets, shapes_of(config), strict=True)
    )
    return (
        "**Nested budgets** (Hou et al. 2020, Devvrit et al. 2023). At each budget the model is a "
        f"smaller one inside itself, without gates: {sizes}. Budget 1 is the whole model. "
        "`model.extract(budget)` makes a smaller model of its own."
    )


def shown_fields(config: Any, fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def citations(config: Any) -> list[str]:
    return [_HOU, _DEVVRIT]
