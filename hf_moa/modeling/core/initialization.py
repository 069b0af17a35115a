"""How the weights of gates and experts start.

A module that starts otherwise than its backbone's has `initialize(scales)`. It uses only functions of
`transformers.initialization`, which do not change loaded weights.
"""

from __future__ import annotations

from typing import NamedTuple


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
