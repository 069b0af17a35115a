"""What a mechanism declares of itself, and the mechanisms that are known.

A mechanism is a folder. Its `mechanism.py` has the fields of its configuration, their rules and one
`Mechanism`; all else that the package asks of mechanisms it finds from there: see `Mechanism`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from importlib import import_module
from importlib.util import find_spec
from typing import Any


def _nothing(config: Any) -> None:
    """The check of fields without rules."""


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """A mechanism, as configurations, models, adapters, cards and measures see it.

    Args:
        name: short, as cards and tables have it, such as "mae".
        fields: a dataclass of its configuration fields. Its docstring says what each means.
        is_on: whether a configuration asks for the mechanism.
        check: raises a ValueError for fields that break a rule, of any configuration.
        check_loaded: raises a ValueError for fields that a checkpoint is loaded with (all there are,
            None where none is given), where the weights of its saved configuration, a dict, would mean
            something else.
        unused: the fields that do nothing in a configuration where the mechanism is on, each with the
            reason.
        of_old: what a saved configuration means that lacks one of its fields, where that is not the
            default: it was saved before there was such a field.
        prefixes: what the names of its fields begin with.
        attention_type: the value of that field that chooses it; None where none does.
        ffn_type: the same of that field.
        shape_fields: those of its fields that its weights take their shapes from, or their meaning: an
            adapter of its gates fits only a model that has the same.
        gate_kind: the `gate_kind` of its modules, as FTG calls them; None where it has none.
        gate_name: what the names of those modules end with, such as "gate".
        gate_words: what adapters' cards call them; default: gates, with the kind before.
        gate_modules: names of further modules that train as its gates do, such as "control_symbols".
        has_auxiliary_losses: whether training adds losses of its own.
        counts_what_it_computes: whether one of them is of how much is computed: then training computes
            what eval does (see `may_compute_one_token`).
        code: the modules of its layers, relative to the folder `modeling`: a checkpoint carries them
            where the mechanism is on.
        package: its folder, as `__package__` has it, with what a checkpoint does not carry: see `part`.
    """

    name: str
    fields: type
    is_on: Callable[[Any], bool]
    check: Callable[[Any], None] = _nothing
    check_loaded: Callable[[Any, dict[str, Any]], None] | None = None
    unused: Callable[[Any], dict[str, str]] = lambda config: {}
    of_old: dict[str, Any] = field(default_factory=dict)
    prefixes: tuple[str, ...] = ()
    attention_type: str | None = None
    ffn_type: str | None = None
    shape_fields: tuple[str, ...] = ()
    gate_kind: str | None = None
    gate_name: str | None = None
    gate_words: str | None = None
    gate_modules: tuple[str, ...] = ()
    has_auxiliary_losses: bool = False
    counts_what_it_computes: bool = False
    code: tuple[str, ...] = ()
    package: str | None = None

    def part(self, name: str) -> Any:
        """A module of the mechanism's folder; None where it has none of this name.

        - `upcycling`: `default_fields` (see `hf_moa/upcycle.py`), `convert_attention`,
          `convert_feed_forward` (see `hf_moa/pretrained_weights.py`)
        - `card`: what model cards say of it (see `hf_moa/model_card/mechanisms.py`)
        - `analysis`: its `Measure`s (see `hf_moa/analysis/measure.py`)
        """
        place = f"{self.package}.{name}"
        return import_module(place) if self.package and find_spec(place) else None

    @property
    def defaults(self) -> dict[str, Any]:
        """Its fields and their defaults."""
        return {each.name: each.default for each in fields(self.fields)}


MECHANISMS: dict[str, Mechanism] = {}


def register(*mechanisms: Mechanism) -> None:
    """Make mechanisms known, each instead of one of its name.

    Configurations have their fields from now on, and take their `attention_type` or `ffn_type`.
    """
    MECHANISMS.update({mechanism.name: mechanism for mechanism in mechanisms})


def mechanisms_of(config: Any) -> list[Mechanism]:
    """Those that a configuration asks for."""
    return [mechanism for mechanism in MECHANISMS.values() if mechanism.is_on(config)]


def field_names() -> tuple[str, ...]:
    """The configuration fields of all mechanisms, and those that choose between them."""
    return (
        "attention_type",
        "ffn_type",
        "carry_aux_loss",
        *(n for m in MECHANISMS.values() for n in m.defaults),
    )


def shape_field_names() -> tuple[str, ...]:
    """The `shape_fields` of all mechanisms."""
    return tuple(name for m in MECHANISMS.values() for name in m.shape_fields)


def attention_types() -> tuple[str, ...]:
    """The values of `attention_type`."""
    return ("mha", *(m.attention_type for m in MECHANISMS.values() if m.attention_type))


def ffn_types() -> tuple[str, ...]:
    """The values of `ffn_type`."""
    return ("dense", *(m.ffn_type for m in MECHANISMS.values() if m.ffn_type))


def gate_kinds() -> tuple[str, ...]:
    """The kinds of gates that there are."""
    return tuple(m.gate_kind for m in gated_mechanisms() if m.gate_kind)


def gated_mechanisms() -> list[Mechanism]:
    """Those whose gates FTG can train."""
    return [m for m in MECHANISMS.values() if m.gate_kind]
