"""Nested budgets: the shapes that a stack of layers has, and the one of a call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.budgets import BudgetHolder, BudgetIndex, PairedBudgets, made_on
from .shapes import Shape


class NestedBudget(NamedTuple):
    """What the layers have to know of a call.

    Attributes:
        index: `[B]` into the distinct budgets.
        heads, neurons: how many are computed.
        layers: which layers are.
        head_mask, neuron_mask: where sequences differ: `[B, 1, heads, 1]` and `[B, 1, neurons]`, ones
            for those that a sequence has; else None.
        embedding: no control symbols.
    """

    index: Tensor  # type: ignore[assignment]  # hides the method of tuples
    heads: int
    neurons: int
    layers: tuple[int, ...]
    head_mask: Tensor | None = None
    neuron_mask: Tensor | None = None
    embedding: None = None


class NestedUse(NamedTuple):
    """What a sub-layer reports.

    Attributes:
        macs: multiply-accumulates of the matrices of one head, or of one neuron, for a token.
        length: T.
        padding_mask: `[B, T]`, the real tokens; None for all.
    """

    macs: int
    length: int
    padding_mask: Tensor | None


class NestedBudgets(BudgetHolder):
    """The nested budgets of a stack of layers.

    In training a call without a budget draws one, the same for all its sequences: then the smaller ones
    cost less.

    Args:
        budgets: largest first.
        shapes: what is computed at each.
        half: see `BudgetHolder`.
    """

    def __init__(self, budgets: Sequence[float], shapes: Sequence[Shape], *, half: int | None = None):
        super().__init__(budgets, default=budgets[0], half=half, field="nested_budgets")
        self.shapes = tuple(shapes)

    skips_whole_parts = True
    makes_groups = True

    def has_all_layers(self, budget: Any) -> bool:
        return self._shape_of(budget).layers == self.shapes[0].layers

    @contextmanager
    def of_whole_layers(self, budget: Any) -> Iterator[None]:
        """Have all heads and neurons of a budget's layers at the largest budget, meanwhile."""
        shapes = self.shapes
        self.shapes = (shapes[0]._replace(layers=self._shape_of(budget).layers), *shapes[1:])
        try:
            yield
        finally:
            self.shapes = shapes

    def _shape_of(self, budget: Any) -> Shape:
        return self.shapes[self.values.index(self.share(budget))]

    def share_of(self, budget: Any, *, layer: int, part: str) -> float:
        shape, full = self._shape_of(budget), self.shapes[0]
        if layer not in shape.layers:
            return 0.0
        if part == "gate":
            return 1.0
        if part == "feed_forward":
            return shape.neurons / full.neurons
        return shape.heads / full.heads

    def forward(self, batch_size: int, device: torch.device, budget: Any = None) -> NestedBudget:
        """The shape of a call.

        Args:
            batch_size, device: of the call.
            budget: one for all; a tensor `[B]`; or None: the chosen one if any, else in training a draw,
                in eval the largest.

        Raises:
            ValueError: the model does not know it; or sequences that differ in their layers.
        """
        budget = self._own(budget)
        budget = self.budgets.chosen if budget is None else budget
        if isinstance(budget, BudgetIndex):
            return self._of_each(budget.position)
        if isinstance(budget, Tensor):
            return self._of_each(self.budgets.match(budget.to(device), batch_size))
        if budget is not None:
            position = self.budgets.position(budget)
        elif not self.training:
            position = 0
        elif torch.compiler.is_compiling():  # a graph has one shape: all is computed, and masked
            drawn = torch.randint(len(self.shapes), (1,), device=device)
            return self._of_each(drawn.expand(batch_size))
        else:  # a number of the host, which shapes are made of
            position = int(torch.randint(len(self.shapes), ()))
        index = torch.full((batch_size,), position, device=device)
        return NestedBudget(index, *self.shapes[position])

    def _of_each(self, index: Tensor) -> NestedBudget:
        """Sequences with budgets of their own: computed are the heads and neurons that any of them has,
        and masked those that one has not."""
        if torch.compiler.is_compiling():
            present = list(range(len(self.shapes)))
        else:
            present = sorted(set(index.tolist()))
        if len(present) == 1:
            return NestedBudget(index, *self.shapes[present[0]])
        largest = self.shapes[present[0]]
        if any(self.shapes[i].layers != largest.layers for i in present):
            raise ValueError(
                "budget must be one number for a compiled call, and for all sequences of any, where "
                f"nested_layers gives them different layers (got {[self.values[i] for i in present]}): "
                "call once for each."
            )

        def mask(size: int, of: Sequence[int]) -> Tensor:
            unit = torch.arange(size, device=index.device)
            return (unit < made_on(index.device, of).unsqueeze(-1))[index]

        heads = mask(largest.heads, [shape.heads for shape in self.shapes])
        neurons = mask(largest.neurons, [shape.neurons for shape in self.shapes])
        return NestedBudget(index, *largest, heads[:, None, :, None], neurons[:, None])


class NestedPairs(PairedBudgets):
    """The nested budgets of an encoder and a decoder together: any two. In training both have the same,
    one for all sequences."""

    def __init__(self, budgets: Sequence[float]):
        pairs = [(encoder, decoder) for encoder in budgets for decoder in budgets]
        super().__init__(pairs, field="nested_budgets")
        self.sampled = [(float(budget),) * 2 for budget in budgets]

    def halves(
        self,
        budget: Any,
        *,
        batch_size: int,
        device: torch.device,
        training: bool,
        controls: Sequence[BudgetHolder],
        encoded: Tensor | None = None,
    ) -> tuple[Any, Any]:
        budget = self.chosen if budget is None else budget
        if isinstance(budget, Tensor):
            return super().halves(
                budget,
                batch_size=batch_size,
                device=device,
                training=training,
                controls=controls,
            )
        if budget is not None:
            pair: tuple[Any, ...] = self.distinct[self.position(budget)]
        elif not training:
            pair = self.distinct[self.default]
        elif encoded is not None:  # the decoder goes on at the encoder's
            pair = (encoded, encoded)
        else:
            pair = self.sampled[int(torch.randint(len(self.sampled), ()))]
        return pair[0], pair[1]
