"""CCT's budgets: the control symbols that tell the model (Bapna et al. 2020)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import initialization as init

from ..core.budgets import BudgetHolder


class Budget(NamedTuple):
    """The budgets of one call: `index` `[B]` into the distinct budgets, and the control symbols
    `embedding` `[B, 1, d]`, which are added to all tokens' embeddings; None for none."""

    index: Tensor  # type: ignore[assignment]  # hides the method of tuples
    embedding: Tensor | None


class BudgetControl(BudgetHolder):
    """The budgets of a stack of layers, and a control symbol for each.

    Args:
        budgets, default, half: see `BudgetHolder`.
        hidden_size: d.
        symbols_start_at_zero: control symbols of a converted checkpoint start at zero.
    """

    def __init__(
        self,
        budgets: Sequence[float],
        *,
        default: float,
        hidden_size: int,
        symbols_start_at_zero: bool,
        half: int | None = None,
    ):
        super().__init__(budgets, default=default, half=half, field="cct_budgets")
        self.symbols_start_at_zero = symbols_start_at_zero
        self.control_symbols = nn.Embedding(len(self.budgets.distinct), hidden_size)

    def initialize(self, scales: Any = None) -> None:
        if self.symbols_start_at_zero:
            init.zeros_(self.control_symbols.weight)

    def forward(self, batch_size: int, device: torch.device, budget: Any = None) -> Budget:
        """The budgets of a batch; see `BudgetList.resolve`."""
        index = self.budgets.resolve(
            self._own(budget), batch_size=batch_size, device=device, training=self.training
        )
        return Budget(index, self.control_symbols(index).unsqueeze(1))
