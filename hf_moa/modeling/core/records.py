"""What the parts of a layer report of one call: gates, routings and costs, for outputs and losses."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor


class Record(NamedTuple):
    """The report of one sub-layer; what does not apply is None or empty.

    Attributes:
        expert_weights: an MAE gate's distribution over experts, `[B, E]` (`[B, T, E]` where causal).
        routings: the `Routing` of each router; several where CCT splits a feed-forward layer of experts.
        use: what CCT's gates let through, an `AttentionUse` or a `FeedForwardUse`.
    """

    expert_weights: Tensor | None = None
    routings: tuple[Any, ...] = ()
    use: Any = None


class LayerRecord(NamedTuple):
    """The reports of a layer's sub-layers; `cross_attention` is None in a call without it."""

    attention: Record
    cross_attention: Record | None
    feed_forward: Record

    @property
    def parts(self) -> dict[str, Record]:
        """The reports that there are, by their names."""
        return {name: record for name, record in self._asdict().items() if record is not None}
