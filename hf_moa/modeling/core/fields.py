"""Rules of configuration fields. Each raises a ValueError that names field, rule and value."""

from __future__ import annotations

from typing import Any, NoReturn

from transformers.activations import ACT2FN


def fail(config: Any, name: str, rule: str) -> NoReturn:
    """Raise the ValueError of a field that breaks its rule. It names the field as its backbone does, and
    as the other backbones do."""
    other_names = getattr(config, "attribute_map", {})
    own = other_names.get(name, name)
    others = [other for other, mapped in other_names.items() if mapped == own]
    also = f"; {own} is {' and '.join(others)}, too" if others else ""
    raise ValueError(f"{type(config).__name__}.{own} {rule} (got {getattr(config, own)!r}){also}.")


def check_bool(config: Any, name: str) -> None:
    """Check that the field is a bool."""
    if not isinstance(getattr(config, name), bool):
        fail(config, name, "must be True or False")


def check_choice(config: Any, name: str, choices: tuple[str, ...]) -> None:
    """Check that the field is one of `choices`."""
    if getattr(config, name) not in choices:
        fail(config, name, f"must be one of {', '.join(map(repr, choices))}")


def check_int(config: Any, name: str, *, minimum: int, optional: bool = False) -> None:
    """Check that the field is an integer of at least `minimum`, or None where it is `optional`."""
    value = getattr(config, name)
    if value is None and optional:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        fail(config, name, f"must be an integer of at least {minimum}")


def check_number(
    config: Any,
    name: str,
    *,
    minimum: float,
    maximum: float = float("inf"),
    below: float = float("inf"),
    optional: bool = False,
) -> None:
    """Check that the field is a finite number from `minimum` to `maximum` and below `below`, or None
    where it is `optional`."""
    value = getattr(config, name)
    if value is None and optional:
        return
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not minimum <= value <= maximum or not value < below:
        upper = "" if maximum == float("inf") else f" and at most {maximum}"
        upper += "" if below == float("inf") else f" and below {below}"
        fail(config, name, f"must be a finite number of at least {minimum}{upper}")


def check_activation(config: Any, name: str) -> None:
    """Check that the field names one of transformers' activation functions."""
    if getattr(config, name) not in ACT2FN:
        fail(config, name, f"must be one of {', '.join(sorted(ACT2FN))}")


def is_budget(value: Any) -> bool:
    """Whether `value` is a compute budget: a number in (0, 1]."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < float(value) <= 1
