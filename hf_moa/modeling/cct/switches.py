"""The switches of CCT models: execution, gates and noise."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ..core.mixins import ModelMixin
from .mechanism import CCT_EXECUTIONS


class CctSwitches(ModelMixin):
    """Methods of every gated model that rule its CCT gates at run time."""

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
        self._needs_cct("set_cct_execution")
        module: Any
        for module in self.modules():
            if isinstance(module, CctSwitches):
                module.config.cct_execution = execution
            elif "cct_execution" in vars(module):
                module.cct_execution = execution

    def set_cct_gates(self, gates: Callable[[Any, Tensor], Tensor] | float | None) -> None:
        """Decide in eval what CCT's gates let through, instead of the control networks: to measure a
        model at a share of open gates, or to compare forms of execution. The networks are computed all
        the same, so that it takes as long as their own decisions; a gate whose logit is NaN is open.

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

        self._needs_cct("set_cct_gates")
        module: Any
        for module in self.modules():
            if getattr(module, "gate_kind", None) == "cct":
                module.forced = gates
            elif "ignores_plain" in vars(module):
                module.ignores_plain = gates is not None

    def set_cct_noise_scale(self, scale: float) -> None:
        """Set alpha, the scale of the noise on CCT's gates in training (Bapna et al. 2020).

        Raises:
            ValueError: the model has no CCT, or the scale is negative or not finite.
        """
        if not isinstance(scale, Real) or not 0 <= scale < float("inf"):
            raise ValueError(f"scale must be a finite number of at least 0 (got {scale!r}).")
        self._needs_cct("set_cct_noise_scale")
        for module in self.modules():
            if "noise_scale" in module._buffers:
                module.noise_scale.fill_(scale)

    def _needs_cct(self, caller: str) -> None:
        # by mark, not by class: the code of a model without CCT is without them
        if not any("control_symbols" in module._modules for module in self.modules()):
            raise ValueError(f"{caller} needs a model with CCT; set cct_budgets in its config.")
