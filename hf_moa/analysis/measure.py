"""What `analyze` asks of the measures of a mechanism, which are in its folder, in `analysis.py`:

MEASURES: tuple[type[Measure], ...]
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from hf_moa.modeling.core.mechanism import Mechanism

from .observe import Observation
from .sections import Section
from .vocabulary import Vocabulary

if TYPE_CHECKING:
    import pandas as pd


class Measure:
    """Counts what gates do over a stream of calls.

    Attributes:
        sections: what a report says of the tables, in its order. It shows no table without a section.
        at_every_budget: whether it sees the calls at each of CCT's budgets, or at the first only.

    Args:
        model: a gated model with the mechanism.
        vocabulary: names and kinds of tokens.
        least_count: occurrences of the tokens that tables of single tokens name.
        top_tokens: how many they name.
    """

    sections: ClassVar[tuple[Section, ...]] = ()
    at_every_budget: ClassVar[bool] = False

    def __init__(
        self, model: nn.Module, vocabulary: Vocabulary, *, least_count: int = 10, top_tokens: int = 10
    ):
        self.vocabulary = vocabulary
        self.least_count = least_count
        self.top_tokens = top_tokens

    def update(self, observation: Observation) -> None:
        """Count one call."""
        raise NotImplementedError

    def tables(self) -> dict[str, pd.DataFrame]:
        """What was counted, by the names of the tables.

        Raises:
            ValueError: nothing was measured.
        """
        raise NotImplementedError

    def facts(self, tables: dict[str, pd.DataFrame]) -> dict[str, Any]:
        """What a report's head has of the tables, in a few words."""
        return {}


def measures_of(mechanisms: Iterable[Mechanism]) -> list[type[Measure]]:
    """The measures of some mechanisms, in their order."""
    parts = [mechanism.part("analysis") for mechanism in mechanisms]
    return [measure for part in parts if part is not None for measure in part.MEASURES]
