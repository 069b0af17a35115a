"""How a model's compute budget is chosen, and how a call's becomes what its layers have to know."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from .mixins import ModelMixin
from .slots import GATINGS

logger = logging.get_logger(__name__)


class BudgetSwitches(ModelMixin):
    """Methods of every gated model that rule its compute budget at run time."""

    def set_budget(self, budget: float | tuple[float, float] | None) -> None:
        """Use this compute budget wherever a call names none; None goes back to the default.

        Args:
            budget: one of `config.listed_budgets`; of an encoder-decoder model also a pair, the
                encoder's and the decoder's.

        Raises:
            ValueError: a budget is given, and the model has none, or not this one in its list.
        """
        for control in self._budget_controls("set_budget", needed=budget is not None):
            control.choose(budget)

    @property
    def budget_control(self) -> Any:
        """The `BudgetHolder` of a stack of layers; None without budgets."""
        return self.cct  # by the name that checkpoints have for it

    def _make_budget_control(self) -> Any:
        gating = GATINGS.of(self.config)
        return None if gating is None else gating.stack(self.config)

    def _budget_controls(self, caller: str, *, needed: bool = True) -> list[Any]:
        # by mark, not by class: the code of a model without budgets is without them
        controls = [module for module in self.modules() if hasattr(type(module), "holds_budgets")]
        if needed and not controls:
            raise ValueError(
                f"{caller} needs a model with budgets; set nested_budgets or cct_budgets in its config."
            )
        return controls

    def makes_cache(self, use_cache: bool | None) -> bool:
        """Whether a call with this argument makes a cache."""
        is_causal = any(getattr(module, "is_causal", False) for module in self.modules())
        return is_causal and (self.config.use_cache if use_cache is None else use_cache)

    def _resolve_budget(self, tokens: Tensor, budget: Any) -> Any:
        """What a call of a stack on `tokens` `[B, ...]` has to know; None without budgets."""
        if self.budget_control is not None:
            if budget is not None and not self.training:
                self._say_where_gates_are_untrained()
            return self.budget_control(tokens.shape[0], tokens.device, budget)
        self._refuse_budget(budget)
        return None

    _looked_at_gates = False

    def _say_where_gates_are_untrained(self) -> None:
        """Warn at the first call with a budget: gates that nobody trained skip nothing."""
        if self._looked_at_gates or torch.compiler.is_compiling():
            return
        self._looked_at_gates = True
        found = [module.is_untrained for module in self.modules() if hasattr(module, "is_untrained")]
        if found and all(found):
            logger.warning(
                f"The gates of this {type(self).__name__} were never trained. They are open at every "
                "budget, and all is computed, until the model is finetuned with its budgets."
            )

    @staticmethod
    def _refuse_budget(budget: Any) -> None:
        if budget is not None:
            raise ValueError(
                "budget needs a model with budgets; set nested_budgets or cct_budgets in its config "
                f"(got {budget!r})."
            )
