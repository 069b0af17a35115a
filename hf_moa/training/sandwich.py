"""Every budget in every training step: the sandwich rule of Yu & Huang 2019, "Universally Slimmable
Networks and Improved Training Techniques", with all budgets instead of the largest, the smallest and
some drawn ones between."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .teachers import SELF
from .trainer_base import TrainerBase


class Pass(NamedTuple):
    """One of the passes over a micro-batch: at which budget, its weight in the loss, and whether it is
    the first, of the largest budget."""

    budget: Any
    share: float
    is_first: bool

    @property
    def name(self) -> str:
        """As in the names of statistics."""
        values = self.budget if isinstance(self.budget, tuple) else (self.budget,)
        return "_".join(f"{value:g}" for value in values)


class TrainsEveryBudget(TrainerBase):
    """Mixin for `Trainer`: with `budget_sampling="all"` a step is a forward and a backward at each
    budget, largest first, and the gradients' weighted mean is its own. It needs the memory of one."""

    _pass: Pass | None = None  # the one that is going on

    @property
    def budget_sampling(self) -> str | None:
        """How this run samples budgets: "draw" or "all"; None for a model without budgets."""
        asked = self.args.budget_sampling
        if not _budget_shares(self._gated_model()):
            return None
        if asked is None:
            return "all" if self._teaches_itself() else "draw"
        return asked

    def _teaches_itself(self) -> bool:
        return isinstance(self.teacher, str) and self.teacher == SELF

    def _check_budget_sampling(self) -> None:
        """Raise a ValueError where budgets cannot be sampled so."""
        model, asked = self._gated_model(), self.args.budget_sampling
        budgets = list(_budget_shares(model))
        if asked is not None and not budgets:
            raise ValueError(
                f"budget_sampling={asked!r} needs a model with budgets (got a {type(model).__name__} "
                "without). Leave it out, or give the model budgets, as `hf_moa.upcycle` does."
            )
        if self._teaches_itself() and (len(budgets) < 2 or asked == "draw"):
            raise ValueError(
                "teacher='self' distils the largest budget into the others in each step: it needs a "
                f"model with several, and budget_sampling='all' (got budgets {budgets} and "
                f"budget_sampling={asked!r})."
            )
        if self.budget_sampling == "all" and self.is_deepspeed_enabled:
            raise ValueError(
                "budget_sampling='all' has several backwards in a step, which DeepSpeed would take for "
                "several steps: use DDP or FSDP, or budget_sampling='draw'."
            )

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """As in `Trainer`, once or at each budget; the loss is their weighted mean."""
        if self.budget_sampling != "all":
            return super().training_step(model, inputs, num_items_in_batch)
        if inputs.get("budget") is not None:
            raise ValueError(
                "budget_sampling='all' gives every budget to every batch, and the data must hold no "
                "`budget`: leave the column out, or budget_sampling."
            )
        losses, shares = [], _budget_shares(self._gated_model())
        try:
            for number, (budget, share) in enumerate(shares.items(), start=1):
                self._pass = Pass(budget, share, number == 1)
                waits = number < len(shares) and self.accelerator.sync_gradients
                with self.accelerator.no_sync(model=model) if waits else nullcontext():
                    at_budget = {**inputs, "budget": budget}
                    losses.append(super().training_step(model, at_budget, num_items_in_batch))
        finally:
            self._pass = None
        return torch.stack(losses).sum()

    def _at_budget(self, terms: dict[str, Tensor], task_loss: Tensor | None) -> dict[str, Tensor]:
        """Terms of the loss for the logs: as they are, and in a pass at a budget also under its name."""
        if self._pass is None:
            return terms
        own = terms if task_loss is None else {"task_loss": task_loss, **terms}
        return terms | {f"{name}_{self._pass.name}": value for name, value in own.items()}

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """As in `Trainer`; in a pass at one of the budgets, what it adds to the step's loss."""
        found = super().compute_loss(*args, **kwargs)
        if self._pass is None:
            return found
        if isinstance(found, tuple):
            return found[0] * self._pass.share, *found[1:]
        return found * self._pass.share


def _budget_shares(model: nn.Module) -> dict[Any, float]:
    """The budgets that a model says it has, largest first, and the share of each in training."""
    return getattr(getattr(model, "config", None), "budget_shares", {})
