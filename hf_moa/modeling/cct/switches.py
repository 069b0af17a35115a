"""The switches of CCT models: budget, execution and noise; and how a call's budget is resolved."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ..core.mixins import ModelMixin
from ..core.slots import GATINGS
from .mechanism import CCT_EXECUTIONS


class CctSwitches(ModelMixin):
    """Methods of every gated model that rule its CCT gates at run time."""

    def set_budget(self, budget: float | tuple[float, float] | None) -> None:
        """Use this compute budget wherever a call names none; None goes back to the default.

        Args:
            budget: one of `config.cct_budgets`; of an encoder-decoder model also a pair, the encoder's
                and the decoder's.

        Raises:
            ValueError: a budget is given, and the model has no CCT, or not this one in its list.
        """
        for control in self._budget_controls("set_budget", needed=budget is not None):
            control.choose(budget)

    def set_cct_execution(self, execution: str) -> None:
        """Choose how eval carries out CCT's gates from now on: `"sparse"` computes only the tokens with
        open gates, `"dense"` computes all and masks, `"auto"` takes the faster one. They compute the
        same function. `config.cct_execution` follows.

        Raises:
            ValueError: the model has no CCT, or the execution is unknown.
        """
        if execution not in CCT_EXECUTIONS:
            known = ", ".join(map(repr, CCT_EXECUTIONS))
            raise ValueError(f"execution must be one of {known} (got {execution!r}).")
        self._budget_controls("set_cct_execution")
        module: Any
        for module in self.modules():
            if isinstance(module, CctSwitches):
                module.config.cct_execution = execution
            elif "cct_execution" in vars(module):
                module.cct_execution = execution

    def set_cct_gates(self, gates: Callable[[Any, Tensor], Tensor] | float | None) -> None:
        """Decide in eval what CCT's gates let through, instead of the control networks: to measure a
        model at a share of open gates, or to compare forms of execution.

        Args:
            gates: a share of open gates, drawn for each token; or a function of a `ControlNetwork` and
                its inputs `[B, T, d]` that returns gates `[B, T, n]`, zeros and ones, for its
                `num_gates` n; None lets the networks decide again.

        Raises:
            ValueError: the model has no CCT, or the share is not in [0, 1].
        """
        if not callable(gates) and gates is not None:
            if not isinstance(gates, Real) or not 0 <= gates <= 1:
                raise ValueError(f"gates must be a share in [0, 1], a function or None (got {gates!r}).")
            share = float(gates)

            def gates(network: Any, x: Tensor) -> Tensor:
                return (torch.rand(*x.shape[:-1], network.num_gates, device=x.device) < share).to(
                    x.dtype
                )

        for control in self._budget_controls("set_cct_gates"):
            control.ignores_plain = gates is not None
        module: Any
        for module in self.modules():
            if getattr(module, "gate_kind", None) == "cct":
                module.forced = gates

    def set_cct_noise_scale(self, scale: float) -> None:
        """Set alpha, the scale of the noise on CCT's gates in training (Bapna et al. 2020).

        Raises:
            ValueError: the model has no CCT, or the scale is negative or not finite.
        """
        if not isinstance(scale, Real) or not 0 <= scale < float("inf"):
            raise ValueError(f"scale must be a finite number of at least 0 (got {scale!r}).")
        self._budget_controls("set_cct_noise_scale")
        for module in self.modules():
            if "noise_scale" in module._buffers:
                module.noise_scale.fill_(scale)

    @property
    def budget_control(self) -> Any:
        """The `BudgetControl` of a stack of layers; None without CCT."""
        return self.cct  # by the name that checkpoints have for it

    def _make_budget_control(self) -> Any:
        gating = GATINGS.of(self.config)
        return None if gating is None else gating.stack(self.config)

    def _budget_controls(self, caller: str, *, needed: bool = True) -> list[Any]:
        # by mark, not by class: the code of a model without CCT is without them
        controls = [module for module in self.modules() if "control_symbols" in module._modules]
        if needed and not controls:
            raise ValueError(f"{caller} needs a model with CCT; set cct_budgets in its config.")
        return controls

    def _resolve_budget(self, tokens: Tensor, budget: Any) -> Any:
        """The `Budget` of a call of a stack on `tokens` `[B, ...]`; None without CCT."""
        if self.budget_control is not None:
            return self.budget_control(tokens.shape[0], tokens.device, budget)
        self._refuse_budget(budget)
        return None

    @staticmethod
    def _refuse_budget(budget: Any) -> None:
        if budget is not None:
            raise ValueError(
                f"budget needs a model with CCT; set cct_budgets in its config (got {budget!r})."
            )
