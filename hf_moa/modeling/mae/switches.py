"""The switches of MAE models: what a training step does, and which experts evaluation takes."""

from __future__ import annotations

from typing import Any

from ..core.mixins import ModelMixin

MAE_PHASES = ("mixture", "gate", "expert")
EXPERT_SELECTIONS = ("argmax", "random", None)


class MaeSwitches(ModelMixin):
    """Methods of every gated model that rule its MAE attention at run time."""

    mae_phase = "mixture"

    def set_mae_phase(self, phase: str) -> None:
        """Choose what a training step of an MAE model does (Peng et al. 2020).

        Args:
            phase: `"mixture"` (all experts weighted by the gate; joint training), `"gate"` (the G
                step: the mixture, and only gates receive gradients) or `"expert"` (the F step: one
                expert drawn from the gate's distribution, and gates receive none). The gates'
                running statistics follow their inputs in every phase. Eval always computes the
                mixture. Under DDP, call the model inside the wrapper in the phase "gate", and average
                the gates' gradients (`hf_moa.training.BlockCoordinateDescent` does).

        Raises:
            ValueError: unknown phase; no MAE attention in the model; `"gate"` with uniform or frozen
            gates.
        """
        if phase not in MAE_PHASES:
            raise ValueError(f"phase must be one of {', '.join(map(repr, MAE_PHASES))} (got {phase!r}).")
        mixtures = self._mae_mixtures("set_mae_phase")
        gates = [mixture.gate for mixture in mixtures if mixture.gate is not None]
        if phase == "gate" and not gates:
            raise ValueError(
                "phase 'gate' needs learned gates, but mae_gate_type='uniform' has none to train."
            )
        if phase == "gate" and not any(p.requires_grad for gate in gates for p in gate.parameters()):
            raise ValueError(
                "phase 'gate' needs gates that can learn, but all are frozen (requires_grad=False). "
                'Under a PEFT adapter, keep them trainable with modules_to_save=["gate"].'
            )
        for mixture in mixtures:
            mixture.phase = phase
        module: Any
        for module in self.modules():
            if hasattr(type(module), "mae_phase"):
                module.mae_phase = phase

    def set_expert_selection(self, selection: str | None) -> None:
        """Evaluate an MAE model with one expert per layer (Peng et al. 2020, table 5).

        Args:
            selection: `"argmax"` (the expert with the largest gate), `"random"` (one drawn
                uniformly), each per sequence, or per position where causal; None for the mixture.

        Raises:
            ValueError: unknown selection; one is given, and there is no MAE attention in the model.
        """
        if selection not in EXPERT_SELECTIONS:
            raise ValueError(f"selection must be 'argmax', 'random' or None (got {selection!r}).")
        for mixture in self._mae_mixtures("set_expert_selection", needed=selection is not None):
            mixture.selection = selection

    def _mae_mixtures(self, caller: str, *, needed: bool = True) -> list[Any]:
        # by mark, not by class: a plain model's code is without the mixture's
        mixtures = [module for module in self.modules() if getattr(module, "has_phases", False)]
        if needed and not mixtures:
            raise ValueError(
                f"{caller} needs attention_type='mae' (this model has "
                f"attention_type={self.config.attention_type!r})."
            )
        return mixtures
