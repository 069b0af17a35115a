"""Names of budgets in tables and figures."""

from typing import Any


def budget_name(budget: Any) -> Any:
    """A number, or the pair of an encoder and a decoder in words."""
    if isinstance(budget, (tuple, list)):
        return ", ".join(f"{number:g}" for number in budget)
    return budget
