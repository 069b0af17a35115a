"""Which budgets a training step has: one that is drawn, or all of them (the sandwich rule).

With `budget_sampling="all"` each micro-batch runs once at every budget of the model, and their gradients
are averaged before the update (Yu & Huang 2019, "Universally Slimmable Networks and Improved Training
Techniques"). Each has its backward before the next one's forward: memory is that of one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

BUDGET_SAMPLINGS = ("draw", "all")


def budgets_of(model: Any) -> list[Any]:
    """The budgets that a model knows, largest first; none where it has none."""
    return list(getattr(getattr(model, "config", None), "listed_budgets", []))


def runs_of_a_step(
    model: nn.Module, budgets: list[Any]
) -> Iterator[tuple[Any, AbstractContextManager[Any]]]:
    """Each budget, largest first, and what its forward and backward run in: only the last of them
    exchanges gradients between processes."""
    inner: Any = getattr(model, "_orig_mod", model)
    for i, budget in enumerate(budgets):
        waits = i < len(budgets) - 1 and isinstance(inner, DistributedDataParallel)
        yield budget, inner.no_sync() if waits else nullcontext()
