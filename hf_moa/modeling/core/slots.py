"""Where mechanisms plug into layers and models.

A mechanism's code fills slots with its classes; layers and models ask a slot what a configuration wants
there. So a layer names no mechanism, and a checkpoint can carry the code of its own mechanisms only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .mechanism import mechanisms_of

_HERE: set[str] = set()  # names of the mechanisms whose code is here


class Slot(dict[str, Any]):
    """What fills one place, by the name of the mechanism."""

    def filled_by(self, name: str) -> Callable[[Any], Any]:
        """Decorate what a mechanism puts here."""

        def fill(filling: Any) -> Any:
            self[name] = filling
            _HERE.add(name)
            return filling

        return fill

    def of(self, config: Any) -> Any:
        """What a configuration wants here; None for the backbone's own.

        Raises:
            ValueError: two of its mechanisms want the same place.
        """
        names = [mechanism.name for mechanism in mechanisms_of(config) if mechanism.name in self]
        if len(names) > 1:
            raise ValueError(f"{' and '.join(names)} cannot both be on: they fill the same place.")
        return self[names[0]] if names else None


# mixtures of heads: subclasses of `MultiHead`
MIXTURES = Slot()
# feed-forward layers: classes with `from_config`, see `feed_forward/layers.py`
FEED_FORWARDS = Slot()
# what decides for each token which parts of a layer are computed: see `TokenGating` in `cct/gating.py`
GATINGS = Slot()
# functions that add up what layers report: see `core/totals.py`
TOTALS = Slot()


def require_code(config: Any) -> None:
    """Check that the code of every mechanism that a configuration asks for is here.

    Raises:
        ValueError: a checkpoint's own code lacks it, since the checkpoint was saved without.
    """
    for mechanism in mechanisms_of(config):
        if mechanism.code and mechanism.name not in _HERE:
            raise ValueError(
                f"{type(config).__name__} asks for {mechanism.name}, and the code that came with this "
                "checkpoint has only what the checkpoint was saved with. Install hf_moa, which has all."
            )
