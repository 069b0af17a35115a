"""Sequences of one batch with budgets of their own: computed in groups, each at its own size.

Where a budget is a shape of the layers, as a nested one, a batch of several budgets would be computed at
the largest. Sequences do not need each other in eval, so that those of one budget go through the model
together, and their outputs are put back in order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from .budgets import BudgetIndex
from .tracing import is_traced

# of arguments that are of no sequence
_PLAIN = (int, float, str, bool, type(None), PreTrainedConfig)


def in_groups_of_budgets(forward: Callable) -> Callable:
    """Decorate the `forward` of a stack of layers that has a `budget_control` and takes `budget`.

    It stays one call where there is a cache, which holds the sequences together; in training, where the
    statistics of gates do; and in a graph.
    """

    @wraps(forward)
    def wrapper(self, *args: Any, **kwargs: Any) -> Any:
        index = _index(self, kwargs)
        present = [] if index is None else sorted(set(index.tolist()))
        if index is None or len(present) < 2:
            return forward(self, *args, **kwargs)
        values, batch = self.budget_control.values, len(index)
        rows = [(index == each).nonzero().squeeze(1) for each in present]
        outputs = []
        for each, chosen in zip(present, rows, strict=True):
            own = {name: _of(value, chosen, batch) for name, value in kwargs.items()}
            own |= {"budget": values[each]}
            outputs.append(forward(self, *(_of(value, chosen, batch) for value in args), **own))
        return _merged(outputs, torch.cat(rows).argsort(), [values[each] for each in present])

    return wrapper


def _index(model: Any, kwargs: dict[str, Any]) -> Tensor | None:
    """The budget of each sequence, `[B]` among the distinct ones; None where the call is not split."""
    budget, control = kwargs.get("budget"), model.budget_control
    if not isinstance(budget, (Tensor, BudgetIndex)) or not getattr(control, "makes_groups", False):
        return None
    if model.training or kwargs.get("cache") is not None or model.makes_cache(kwargs.get("use_cache")):
        return None
    if not all(isinstance(value, (Tensor, BudgetIndex, *_PLAIN)) for value in kwargs.values()):
        return None  # which may belong to certain sequences
    if isinstance(budget, BudgetIndex):
        return None if budget.known is not None or is_traced(budget.position) else budget.position
    if budget.ndim != 1 or is_traced(budget):
        return None
    return control.budgets.match(budget, len(budget))


def _of(value: Any, rows: Tensor, batch: int) -> Any:
    """What of an argument is of some of the sequences."""
    if not isinstance(value, Tensor) or value.ndim == 0 or len(value) != batch:
        return value
    return value.index_select(0, rows.to(value.device))


def _merged(outputs: list[Any], order: Tensor, budgets: list[float]) -> Any:
    """The groups' outputs as one, in the order of the batch."""
    first = outputs[0]
    if isinstance(first, Tensor):
        return torch.cat(outputs).index_select(0, order.to(first.device))
    if isinstance(first, tuple):
        if len({len(output) for output in outputs}) > 1:
            raise ValueError(
                "budget must be one number for all sequences where hidden states, attentions or gates "
                f"are asked for, and budgets have different layers (got {budgets}): call once for each."
            )
        return tuple(_merged(list(each), order, budgets) for each in zip(*outputs, strict=True))
    if isinstance(first, dict):  # as are transformers' outputs
        found = {name: _merged([o[name] for o in outputs], order, budgets) for name in first}
        return type(first)(**found)
    return first  # None
