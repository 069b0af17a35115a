"""The switch of MoA models: how the experts' projections are computed."""

from __future__ import annotations

from typing import Any

from ..core.mixins import ModelMixin
from .mechanism import MOA_EXECUTIONS


class MoaSwitches(ModelMixin):
    """A method of every gated model that rules its MoA attention at run time."""

    def set_moa_execution(self, execution: str) -> None:
        """Choose how the projections of MoA's experts are computed from now on: `"sparse"` computes only
        the chosen experts, `"dense"` computes all and selects, `"auto"` takes the faster one. They
        compute the same function. `config.moa_execution` follows.

        Raises:
            ValueError: the model has no MoA attention, or the execution is unknown.
        """
        if execution not in MOA_EXECUTIONS:
            known = ", ".join(map(repr, MOA_EXECUTIONS))
            raise ValueError(f"execution must be one of {known} (got {execution!r}).")
        # by mark, not by class: the code of a model without MoA is without them
        projections: list[Any] = [module for module in self.modules() if "moa_execution" in vars(module)]
        if not projections:
            raise ValueError(
                "set_moa_execution needs attention_type='moa' (this model has "
                f"attention_type={self.config.attention_type!r})."
            )
        for projection in projections:
            projection.moa_execution = execution
        for module in self.modules():
            if isinstance(module, MoaSwitches):
                module.config.moa_execution = execution
