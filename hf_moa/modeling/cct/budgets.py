"""CCT's budgets: the control symbols that tell the model (Bapna et al. 2020)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import initialization as init

from ..core.budgets import BudgetHolder


class Budget(NamedTuple):
    """The budgets of one call.

    Attributes:
        index: `[B]` into the distinct budgets.
        embedding: the control symbols `[B, 1, d]`, which are added to all tokens' embeddings; None for
            none.
        plain: `[B]` bool, the sequences of which all gates are open, whatever they would decide; None
            for none.
        is_plain: whether that is so of all sequences, in eval: then gates are not computed. False where
            only a look at the tensor could tell.
    """

    index: Tensor  # type: ignore[assignment]  # hides the method of tuples
    embedding: Tensor | None
    plain: Tensor | None = None
    is_plain: bool = False


class BudgetControl(BudgetHolder):
    """The budgets of a stack of layers, and a control symbol for each, where there are such.

    Args:
        budgets, default, half: see `BudgetHolder`.
        hidden_size: d.
        symbols_start_at_zero: control symbols of a converted checkpoint start at zero.
        has_symbols: whether there are control symbols.
        full_is_plain: whether a budget of 1 opens all gates, and has no control symbol.

    Attributes:
        ignores_plain: gates decide at every budget; see `set_cct_gates`.
    """

    control_symbols: nn.Embedding | None

    def __init__(
        self,
        budgets: Sequence[float],
        *,
        default: float,
        hidden_size: int,
        symbols_start_at_zero: bool,
        half: int | None = None,
        has_symbols: bool = True,
        full_is_plain: bool = False,
    ):
        super().__init__(budgets, default=default, half=half, field="cct_budgets")
        self.symbols_start_at_zero = symbols_start_at_zero
        self.has_plain = full_is_plain and self.values[0] == 1
        self.ignores_plain = False
        number = len(self.budgets.distinct)
        symbols = nn.Embedding(number, hidden_size) if has_symbols else None
        self.register_module("control_symbols", symbols)

    def initialize(self, scales: Any = None) -> None:
        if self.symbols_start_at_zero and self.control_symbols is not None:
            init.zeros_(self.control_symbols.weight)

    def forward(self, batch_size: int, device: torch.device, budget: Any = None) -> Budget:
        """The budgets of a batch; see `BudgetList.resolve`."""
        own = self._own(budget)
        index = self.budgets.resolve(own, batch_size=batch_size, device=device, training=self.training)
        if not self.has_plain or (self.ignores_plain and not self.training):
            return Budget(index, self._symbols(index))
        # in training every parameter takes part in every step, for those who wait for its gradient
        if not self.training and self.budgets.known(own, training=False) == 0:
            return Budget(index, None, is_plain=True)
        plain = index == 0
        symbols = self._symbols(index)
        if symbols is not None:
            symbols = symbols.masked_fill(plain[:, None, None], 0)
        return Budget(index, symbols, plain)

    def _symbols(self, index: Tensor) -> Tensor | None:
        """`[B, 1, d]`."""
        return None if self.control_symbols is None else self.control_symbols(index).unsqueeze(1)
