"""What a training step tells about its gates, averaged from one log to the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_moa.modeling.core.budgets import made_on
from hf_moa.modeling.core.precision import in_float64


class StepStatistics:
    """Running means of losses, compute, entropies and loads; tensors stay on the device until asked.

    Names of the means (encoder-decoder models put `encoder_`, `decoder_` or `cross_` before some):

    - `task_loss`: the loss without auxiliary terms, where it has some;
    - `router_balance_loss`, `router_z_loss`, ..., `budget_loss`: the auxiliary terms, unweighted;
    - `compute_fraction_<budget>`: share of the gated computation, of the sequences with that budget;
    - `gate_entropy`: of the MAE gates, in nats, mean over layers and, where causal, all positions
      (log E where gates are uniform);
    - `expert_load_max`, `expert_load_min`: the most and the least used expert's share of the
      assignments, relative to an even one, mean over layers.
    """

    def __init__(self):
        self._sums: dict[str, Tensor] = {}
        self._weights: dict[str, Tensor | float] = {}
        self._layers: dict[str, tuple[Tensor, int]] = {}  # a number for each, and of how many batches
        self.latest: dict[str, Tensor] = {}  # losses of the last micro-batch

    def add(self, name: str, total: Tensor, weight: Tensor | float = 1.0) -> None:
        """Add a scalar, the sum of `weight` values, to the mean of that name."""
        total = in_float64(total.detach())
        if name in self._sums:
            total, weight = self._sums[name] + total, self._weights[name] + weight
        self._sums[name], self._weights[name] = total, weight

    def add_outputs(self, outputs: Any, *, part_of_mean: float | None, budgets: list | None) -> None:
        """Add the outputs of one micro-batch.

        Args:
            outputs: of a gated model in training mode, with labels.
            part_of_mean: where the losses of an update's micro-batches (of all processes) add up to
                its loss: 1 / their number. None where each is a mean of its own.
            budgets: the distinct budgets of a CCT model, as its outputs give them.
        """
        self.note_losses(outputs)
        for name in outputs.get("aux_losses") or {}:
            self.add(name, self.latest[name])
        if "task_loss" in self.latest:
            self.add("task_loss", self.latest["task_loss"], part_of_mean or 1.0)
        if budgets is not None and outputs.get("budget") is not None:
            self._add_compute(outputs["compute_fraction"], outputs["budget"], budgets)
        for name, load in (outputs.get("expert_load") or {}).items():
            self._add_load(name, load)
        for name in ("expert_weights", "encoder_expert_weights", "decoder_expert_weights",
                     "cross_expert_weights"):  # fmt: skip
            if outputs.get(name) is not None:
                self._add_entropy(name.replace("expert_weights", "gate_entropy"), outputs[name])

    def note_losses(self, outputs: Any) -> None:
        """Keep the losses of one micro-batch as the `latest`; the means do not count them."""
        named = {**(outputs.get("aux_losses") or {})}
        named |= {name: outputs.get(name) for name in ("task_loss", "loss")}
        self.latest = {name: x.detach().mean() for name, x in named.items() if x is not None}

    def _add_compute(self, fraction: Tensor, budget: Tensor, budgets: list) -> None:
        called = budget.view(len(fraction), -1)  # the budget of each sequence
        for known in budgets:
            values = known if isinstance(known, tuple) else (known,)
            drawn = (called - made_on(called.device, values, called.dtype)).abs().amax(dim=-1) < 1e-6
            count = in_float64(drawn.sum())
            name = "compute_fraction_" + "_".join(f"{value:g}" for value in values)
            self.add(name, (fraction * drawn).sum(), count)

    def _add_load(self, name: str, load: Tensor) -> None:
        relative = load.view(-1, load.shape[-1]) * load.shape[-1]
        prefix = name.removesuffix("attention") if name.endswith("attention") else f"{name}_"
        self.add(f"{prefix}expert_load_max", relative.amax(dim=-1).mean())
        self.add(f"{prefix}expert_load_min", relative.amin(dim=-1).mean())

    def _add_entropy(self, name: str, layers: tuple[Tensor, ...]) -> None:
        entropies = [
            torch.special.entr(weights.detach().float()).sum(dim=-1).mean() for weights in layers
        ]
        by_layer = torch.stack([e.to(entropies[-1].device) for e in entropies])
        self.add(name, by_layer.mean())
        total, count = self._layers.get(name, (0.0, 0))
        self._layers[name] = by_layer + total, count + 1

    def drain(self, sum_over_processes: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """The means since the last call, over all processes, which call it together."""
        names = list(self._sums)
        if not names:
            return {}
        sums = torch.tensor(
            [[float(self._sums[n]), float(self._weights[n])] for n in names], dtype=torch.float64
        )
        self._sums, self._weights = {}, {}
        totals = sum_over_processes(sums).tolist()
        return {
            name: total / weight for name, (total, weight) in zip(names, totals, strict=True) if weight
        }

    def drain_layers(self, sum_over_processes: Callable[[Tensor], Tensor]) -> dict[str, list[float]]:
        """The mean entropies of each layer's gates since the last call, over all processes."""
        means = {}
        for name, (total, count) in self._layers.items():
            sums = torch.cat([total.double().cpu(), torch.tensor([float(count)], dtype=torch.float64)])
            *totals, number = sum_over_processes(sums).tolist()
            means[name] = [value / number for value in totals]
        self._layers = {}
        return means


def distinct_budgets(config: Any) -> list | None:
    """The budgets of a model as its outputs give them, largest first; None without CCT."""
    if getattr(config, "cct_budgets", None) is None:
        return None
    budgets = config.budget_pairs if config.is_encoder_decoder else config.stack_budgets
    return sorted(set(budgets), reverse=True)
