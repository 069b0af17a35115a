"""How evenly experts are used, by routers and by MAE's gates: the mean over batches, and its table."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .markdown import union_table
from .modeling.core.precision import in_float64

if TYPE_CHECKING:
    import pandas as pd

# With more experts than this, their shares do not fit on a line.
_MOST_SHARES = 16
_GATE_WEIGHTS = tuple(f"{half}expert_weights" for half in ("", "encoder_", "decoder_", "cross_"))


class MeanExpertLoad:
    """Mean of the outputs' loads; tensors stay on the device until asked.

    mean = MeanExpertLoad()
    mean.add_outputs(model(**batch))
    mean.drain(lambda x: x)  # {"attention": [[0.25, 0.75], ...]}, [layers][N]
    """

    def __init__(self):
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, Tensor] = {}

    def add_outputs(self, outputs: Mapping[str, Any]) -> None:
        """Add a batch: its routers' `expert_load`, and where it returned them, the mean weights that
        MAE's gates gave (of causal gates over all positions)."""
        self.add(outputs.get("expert_load"))
        for name in _GATE_WEIGHTS:
            layers = outputs.get(name)
            if layers is not None:
                # shape: (B, E) or (B, T, E) a layer -> (layers, E)
                means = [weights.detach().flatten(0, -2).mean(dim=0) for weights in layers]
                part = name.replace("expert_weights", "MAE_gate")
                self.add({part: torch.stack([mean.to(means[-1].device) for mean in means])})

    def add(self, load: Mapping[str, Tensor] | None) -> None:
        """Add a batch: `{part of the layer: [layers, N]}`. Layers that routed nothing do not count."""
        for part, shares in (load or {}).items():
            shares = in_float64(shares.detach())
            # shape: (layers, N) -> (layers, 1)
            count = shares.sum(dim=-1, keepdim=True).gt(0).to(shares.dtype)
            if part in self._sums:
                shares, count = self._sums[part] + shares, self._counts[part] + count
            self._sums[part], self._counts[part] = shares, count

    def drain(self, sum_over_processes: Callable[[Tensor], Tensor]) -> dict[str, list[list[float]]]:
        """The mean since the last call, over all processes, which call it together."""
        means = {}
        for part, shares in self._sums.items():
            total = sum_over_processes(shares.cpu())
            count = sum_over_processes(self._counts[part].cpu())
            means[part] = (total / count.clamp(min=1)).tolist()
        self._sums, self._counts = {}, {}
        return means


def expert_load_in(
    tables: Mapping[str, pd.DataFrame], *, is_encoder_decoder: bool
) -> dict[str, list[list[float]]]:
    """The load that an analysis measured, under the names that `MeanExpertLoad` has for it.

    Args:
        tables: of `hf_moa.analysis.analyze`: `expert_load` and `mae_experts` are read.
        is_encoder_decoder: whether the model has two halves, to name the parts by.

    Returns:
        Part of the layer -> `[layers][N]`; empty for a model without experts.
    """
    measured = {
        "attention": (tables.get("expert_load"), "load"),
        "MAE_gate": (tables.get("mae_experts"), "mean weight"),
    }
    loads = {}
    for kind, (rows, column) in measured.items():
        for part, own in () if rows is None else rows.groupby("part", sort=False):
            grid = own.pivot(index="layer", columns="expert", values=column)
            loads[_part(part, kind, is_encoder_decoder)] = grid.to_numpy().tolist()
    return loads


def _part(part: str, kind: str, is_encoder_decoder: bool) -> str:
    """The models' name of a part of an analysis: "cross", "encoder feed_forward"."""
    half, _, named = part.partition(" ")
    if not is_encoder_decoder:
        return named or kind
    if part == "cross" and kind == "attention":
        return "decoder_cross_attention"
    return f"{half}_{named or kind}"


def expert_load_table(expert_load: Mapping[str, Sequence[Sequence[float]]]) -> str:
    """Shares of the experts by layer: least, most, entropy over that of an even load, and each.

    Args:
        expert_load: part of the layer -> `[layers][N]`.

    Raises:
        ValueError: a layer has no experts, or a share is no number in [0, 1].
    """
    rows = []
    most = max(len(shares) for layers in expert_load.values() for shares in layers)
    for part, layers in expert_load.items():
        for i, shares in enumerate(layers):
            if not shares or not all(0 <= share <= 1 + 1e-6 for share in shares):
                raise ValueError(
                    f"expert_load[{part!r}][{i}] must be the shares of a layer's experts, numbers in "
                    f"[0, 1] (got {shares!r})."
                )
            entropy = sum(share * math.log(1 / share) for share in shares if share > 0)
            relative = entropy / math.log(len(shares)) if len(shares) > 1 else 1.0
            numbers = {"least": min(shares), "most": max(shares), "entropy": relative}
            row = {"part": part.replace("_", " "), "layer": i}
            row |= {name: f"{number:.3f}" for name, number in numbers.items()}
            if most <= _MOST_SHARES:
                row["shares"] = " ".join(f"{share:.3f}" for share in shares)
            rows.append(row)
    return union_table(rows)
