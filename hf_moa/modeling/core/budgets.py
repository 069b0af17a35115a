"""Compute budgets: which ones a model knows, and how a call's request becomes one of them.

What a budget does is in a mechanism's folder: CCT's gates see it (`cct/budgets.py`), nested budgets take
slices of the matrices (`nested/budgets.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .precision import in_float64, on_device


class BudgetIndex(NamedTuple):
    """Budgets that are already resolved: `position` `[B]` into the distinct budgets, and `known`, that
    of all sequences, where it is known without a look at the tensor."""

    position: Tensor
    known: int | None = None


class BudgetList:
    """The budgets that a model knows, and how a request becomes one of them per sequence.

    Args:
        budgets: numbers, or pairs of numbers; repeats are sampling weights.
        default: the one of eval where none is chosen; None for the largest.
        field: the configuration field that has them, for messages.

    Attributes:
        sampled: the list as given, each budget a tuple of `width` numbers.
        distinct: the same without repeats, largest first.
        chosen: the budget used wherever a call names none, or None.
    """

    def __init__(self, budgets: Sequence[Any], *, default: Any = None, field: str):
        self.field = field
        entries = [budget if isinstance(budget, (list, tuple)) else [budget] for budget in budgets]
        self.sampled = [tuple(float(value) for value in entry) for entry in entries]
        self.distinct = sorted(set(self.sampled), key=lambda entry: (sum(entry), entry), reverse=True)
        self.width = len(self.distinct[0])
        self._positions = {entry: i for i, entry in enumerate(self.distinct)}
        self.chosen: Any = None
        self.default = 0 if default is None else self.position(default)

    def choose(self, budget: Any) -> None:
        """Use `budget` wherever a call names none; None undoes it."""
        if budget is not None:
            self.position(budget)
        self.chosen = budget

    def position(self, budget: Any) -> int:
        """Index of a budget among the distinct ones.

        Raises:
            ValueError: it is not one of them.
        """
        is_pair = self.width > 1 and isinstance(budget, (list, tuple))
        values = tuple(budget) if is_pair else (budget,) * self.width
        if len(values) == self.width and all(map(_is_number, values)):
            if values in self._positions:  # as each step of a generation asks
                return self._positions[values]
            for i, entry in enumerate(self.distinct):
                if all(abs(known - value) < 1e-6 for known, value in zip(entry, values, strict=True)):
                    return i
        raise ValueError(
            f"budget must be one of the model's budgets {self.names()} (got {budget!r}). "
            f"They are set by `{self.field}` in the config."
        )

    def names(self) -> list[Any]:
        """The distinct budgets as a user writes them."""
        return [entry[0] if self.width == 1 else entry for entry in self.distinct]

    def resolve(
        self,
        budget: Any,
        *,
        batch_size: int,
        device: torch.device,
        training: bool,
        first: Tensor | None = None,
    ) -> Tensor:
        """Index `[B]` of each sequence's budget among the distinct ones.

        Args:
            budget: one for all; a tensor `[B]` with one number per sequence (or `[B, 2]` of pairs);
                or None: the chosen one if any, else in training a uniform draw from the list for
                each sequence, in eval the default.
            batch_size: B.
            device: of the result.
            training: whether None draws.
            first: `[B]` of the list's numbers, with which the pairs that are drawn begin; None for any.

        Raises:
            ValueError: a budget that the model does not know, or a tensor of another shape.
        """
        if budget is None:
            budget = self.chosen
        if isinstance(budget, BudgetIndex):
            return budget.position
        if isinstance(budget, Tensor):
            return self.match(on_device(budget, device), batch_size)
        known = self.known(budget, training=training)
        if known is not None:
            return torch.full((batch_size,), known, device=device)
        table = made_on(device, [self.distinct.index(entry) for entry in self.sampled])
        if first is None:
            return table[torch.randint(len(table), (batch_size,), device=device)]
        firsts = made_on(device, [float(entry[0]) for entry in self.sampled])
        # shape: (B, list)
        fits = (first.to(device).float().unsqueeze(-1) - firsts).abs() < _tolerance(first)
        return table[torch.multinomial(fits.float(), 1).squeeze(-1)]

    def known(self, budget: Any, *, training: bool) -> int | None:
        """The index that `resolve` gives all sequences, where no tensor has to be read to tell it."""
        if budget is None:
            budget = self.chosen
        if isinstance(budget, BudgetIndex):
            return budget.known
        if isinstance(budget, Tensor):
            return None
        if budget is not None:
            return self.position(budget)
        return None if training else self.default

    def match(self, budget: Tensor, batch_size: int) -> Tensor:
        shapes = [(batch_size,)] + ([(batch_size, self.width)] if self.width > 1 else [])
        entries = budget.expand(batch_size) if budget.ndim == 0 else budget
        if entries.shape not in shapes:
            raise ValueError(
                f"budget must be a number or hold one per sequence: shape "
                f"{' or '.join(map(str, shapes))} (got shape {tuple(budget.shape)})."
            )
        if entries.ndim == 1:
            entries = entries.unsqueeze(-1).expand(-1, self.width)
        entries = in_float64(entries)
        table = torch.tensor(self.distinct, device=entries.device, dtype=entries.dtype)
        # shape: (B, 1, width) - (budgets, width) -> (B, budgets)
        distance = (entries.unsqueeze(1) - table).abs().amax(dim=-1)
        closest, index = distance.min(dim=-1)
        known = (closest <= _tolerance(budget)).all()  # False for NaN too
        if torch.compiler.is_compiling():
            torch._assert_async(known)
        elif budget.dtype == torch.bool or not bool(known):
            raise ValueError(
                f"budget must hold budgets of the model, {self.names()} (got {_as_given(budget)}). "
                f"They are set by `{self.field}` in the config."
            )
        return index


class BudgetHolder(nn.Module):
    """The budgets of a stack of layers. A subclass's `forward` makes of a call's budget what its layers
    have to know.

    Args:
        budgets: see `BudgetList`.
        default: the budget of eval where none is chosen.
        half: in an encoder-decoder model, which number of a pair is this stack's: 0 or 1.
        field: the configuration field that has them, for messages.
    """

    holds_budgets = True

    def __init__(self, budgets: Sequence[float], *, default: float, half: int | None, field: str):
        super().__init__()
        self.budgets = BudgetList(budgets, default=default, field=field)
        self.which_half = half  # not `half`, a method of modules

    @property
    def values(self) -> list[float]:
        """The distinct budgets that `Budget.index` points into."""
        return self.budgets.names()

    @property
    def chances(self) -> list[float]:
        """Of each distinct budget to be drawn by a sequence in training."""
        drawn = self.budgets.sampled
        return [drawn.count(entry) / len(drawn) for entry in self.budgets.distinct]

    def choose(self, budget: Any) -> None:
        """Use `budget` wherever a call names none; None undoes it."""
        self.budgets.choose(self._own(budget))

    def share(self, budget: Any = None) -> float:
        """The number that stands for a budget; None for the chosen one, or the default of eval.

        Raises:
            ValueError: the model does not know it.
        """
        own = self._own(budget)
        own = self.budgets.chosen if own is None else own
        return self.values[self.budgets.default if own is None else self.budgets.position(own)]

    # whether a budget leaves out parts of matrices, and not what gates skip
    skips_whole_parts = False
    # whether sequences of different budgets are computed apart
    makes_groups = False

    def has_all_layers(self, budget: Any) -> bool:
        """Whether every layer runs at a budget."""
        return True

    def share_of(self, budget: Any, *, layer: int, part: str) -> float:
        """What share of a layer's part is computed at a budget, for `flops`: of what gates can skip, or
        where it `skips_whole_parts`, of all.

        Args:
            budget: see `share`.
            layer: counted from 0.
            part: "self_attention", "cross_attention", "feed_forward" or "gate".
        """
        return self.share(budget)

    def _own(self, budget: Any) -> Any:
        """This stack's half of a pair."""
        if self.which_half is None:
            return budget
        if isinstance(budget, (list, tuple)) and not isinstance(budget, BudgetIndex):
            return budget[self.which_half] if len(budget) == 2 else budget
        if isinstance(budget, Tensor) and budget.ndim == 2 and budget.shape[-1] == 2:
            return budget[:, self.which_half]
        return budget


class PairedBudgets(BudgetList):
    """The budgets of an encoder and a decoder together: pairs of numbers."""

    def halves(
        self,
        budget: Any,
        *,
        batch_size: int,
        device: torch.device,
        training: bool,
        controls: Sequence[BudgetHolder],
        encoded: Tensor | None = None,
    ) -> tuple[BudgetIndex, BudgetIndex]:
        """The encoder's and the decoder's budget of every sequence.

        Args:
            budget, batch_size, device, training: see `BudgetList.resolve`.
            controls: of the encoder and of the decoder.
            encoded: `[B]`, the budgets of an encoder that has run; None before.
        """
        pair = self.resolve(
            budget, batch_size=batch_size, device=device, training=training, first=encoded
        )
        known = self.known(budget, training=training)
        encoder, decoder = (
            BudgetIndex(made_on(device, positions)[pair], None if known is None else positions[known])
            for positions in (
                [control.budgets.position(value) for value in values]
                for control, values in zip(controls, zip(*self.distinct, strict=True), strict=True)
            )
        )
        return encoder, decoder


def _as_given(budget: Tensor) -> Any:
    """A tensor's numbers as they were written: those of float32 have more digits than one gave."""
    if not budget.is_floating_point():
        return budget.tolist()
    if budget.ndim > 0:
        return [_as_given(each) for each in budget]
    digits = {torch.bfloat16: 2, torch.float16: 3}.get(budget.dtype, 6)
    return float(f"{budget.item():.{digits}g}")


def _tolerance(budget: Tensor) -> float:
    """How far a tensor's numbers may be from those of the list: bfloat16 ones hold 0.33 to 1e-3, float32
    ones, and float64 ones made of those, to 1e-8."""
    return max(torch.finfo(budget.dtype).eps, 1e-6) if budget.is_floating_point() else 0.0


def made_on(device: torch.device, values: Sequence[float], dtype: torch.dtype | None = None) -> Tensor:
    """Numbers that Python knows, as a tensor; on an accelerator none is copied, which would have to
    wait for all that was begun before."""
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.stack([torch.full((), value, device=device, dtype=dtype) for value in values])


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def layers_at(layers: nn.ModuleList, budget: Any) -> Sequence[nn.Module]:
    """The layers of a stack that run at a call's budget."""
    kept = getattr(budget, "layers", None)
    return list(layers) if kept is None else [layers[i] for i in kept]
