"""The gating fields that the command line offers, read from their source.

Importing the configuration imports torch, which is much to wait for where only help is asked for.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from hf_moa.field_meanings import field_meaning

# the constants of a mechanism's module that say what a field may be
_CHOICES = {
    "mae_gate_type": "MAE_GATE_TYPES",
    "moa_execution": "MOA_EXECUTIONS",
    "router_type": "ROUTER_TYPES",
    "cct_execution": "CCT_EXECUTIONS",
    "cct_gate_training": "CCT_GATE_TRAININGS",
    "cct_budget_loss": "CCT_BUDGET_LOSSES",
}
# what a field may be that mechanisms add values to
_PLAIN = {"attention_type": "mha", "ffn_type": "dense"}


@dataclass(frozen=True)
class GatingField:
    """A field of `GatingConfig`.

    Attributes:
        name: of the field.
        kinds: names of its types, such as `("int", "None")`.
        default: of the field.
        meaning: what the docstring says of it, in a sentence.
        choices: the values that it takes; None where it takes all of its types.
    """

    name: str
    kinds: tuple[str, ...]
    default: Any
    meaning: str
    choices: tuple[str, ...] | None


def gating_fields() -> list[GatingField]:
    """The fields of `GatingConfig`, in their order."""
    modeling = Path(__file__).parents[1] / "modeling"
    paths = [modeling / "config" / "gating.py", *modeling.glob("*/mechanism.py")]
    nodes = [node for path in paths for node in ast.parse(path.read_text(encoding="utf-8")).body]
    classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
    constants = {_id(node.targets[0]): node.value for node in nodes if isinstance(node, ast.Assign)}
    values = {name: [plain] for name, plain in _PLAIN.items()}
    for mechanism in next(_registered(nodes)):
        for keyword in cast(ast.Call, constants[mechanism]).keywords:
            if keyword.arg in values:
                values[keyword.arg].append(ast.literal_eval(keyword.value))
    for name, constant in _CHOICES.items():
        values[name] = ast.literal_eval(constants[constant])
    return [
        GatingField(
            name=_id(node.target),
            kinds=tuple(ast.unparse(node.annotation).split(" | ")),
            default=ast.literal_eval(cast(ast.expr, node.value)),
            meaning=field_meaning(ast.get_docstring(fields), _id(node.target)),
            choices=tuple(values[_id(node.target)]) if _id(node.target) in values else None,
        )
        for base in reversed(classes["GatingConfig"].bases)  # a dataclass's own order
        if _id(base) in classes  # not what is there for type checkers
        for fields in [classes[_id(base)]]
        for node in fields.body
        if isinstance(node, ast.AnnAssign)
    ]


def _id(node: ast.expr) -> str:
    """The name that a node is."""
    return cast(ast.Name, node).id


def _registered(nodes: list[ast.stmt]) -> Iterator[list[str]]:
    """The names of the mechanisms that are declared, in their order."""
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield [_id(argument) for argument in node.value.args]
