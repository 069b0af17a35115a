"""The gating fields that the command line offers, read from their source.

Importing the configuration imports torch, which is much to wait for where only help is asked for.
"""

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_moa.field_meanings import field_meaning

_SOURCE = Path(__file__).parents[1] / "modeling" / "core" / "configuration.py"
_CHOICES = {
    "attention_type": "ATTENTION_TYPES",
    "mae_gate_type": "MAE_GATE_TYPES",
    "router_type": "ROUTER_TYPES",
    "ffn_type": "FFN_TYPES",
    "cct_execution": "CCT_EXECUTIONS",
}


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
    module = ast.parse(_SOURCE.read_text(encoding="utf-8")).body
    config = next(node for node in module if isinstance(node, ast.ClassDef))
    constants = {node.targets[0].id: node.value for node in module if isinstance(node, ast.Assign)}
    return [
        GatingField(
            name=node.target.id,
            kinds=tuple(ast.unparse(node.annotation).split(" | ")),
            default=ast.literal_eval(node.value),
            meaning=field_meaning(ast.get_docstring(config), node.target.id),
            choices=ast.literal_eval(constants[_CHOICES[node.target.id]])
            if node.target.id in _CHOICES
            else None,
        )
        for node in config.body
        if isinstance(node, ast.AnnAssign) and not ast.unparse(node.annotation).startswith("ClassVar")
    ]
