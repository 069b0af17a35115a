"""How the weights of gates and experts start.

A module that starts otherwise than its backbone's has `initialize(scales)`. It uses only functions of
`transformers.initialization`, which do not change loaded weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

_beside_weights: ContextVar[bool] = ContextVar("beside_weights", default=False)


@contextmanager
def beside_weights() -> Iterator[None]:
    """While a checkpoint is loaded: what it lacks starts so that the model computes as before."""
    token = _beside_weights.set(True)
    try:
        yield
    finally:
        _beside_weights.reset(token)


def starts_beside_weights() -> bool:
    """Whether a module starts in a model whose other weights are loaded."""
    return _beside_weights.get()


class InitScales(NamedTuple):
    """Standard deviations of a backbone's projections at the start.

    Attributes:
        query, output: of attention: into the heads, and out of them.
        up, down: of the feed-forward layer: into its hidden activation, and out of it.
        num_heads: heads of an attention layer that are added up.
    """

    query: float
    output: float
    up: float
    down: float
    num_heads: int
