"""How fast a gated model is at each of its budgets, beside the plain model of its size.

for row in benchmark(model, batch):
    print(row)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from . import timing
from .eval_mode import in_eval_mode
from .modeling.core.mechanism import field_names

if TYPE_CHECKING:
    from .gated_models import GatedPreTrainedModel


@torch.inference_mode()
def benchmark(
    model: GatedPreTrainedModel,
    batch: Mapping[str, Tensor],
    *,
    budgets: Sequence[Any] | None = None,
    turns: int = 11,
    compiled: bool = False,
) -> list[dict[str, Any]]:
    """Time a forward of a model in eval, in turns with the plain model.

    Args:
        model: one of hf_moa's, on the device to measure; in whatever mode, which it is in again
            afterwards.
        batch: arguments of the model. How much CCT computes depends on the text.
        budgets: default: each that the model knows, largest first.
        turns: how often each is timed.
        compiled: time both as torch.compile makes them, on a GPU in CUDA graphs, which take Python out
            of the time. Each budget of nested budgets is a graph of its own.

    Returns:
        One dict each for the plain model: the same class and sizes without gates, of random weights,
        which take the same time (its classifier, too, computes its last layer for the one token that it
        reads); for the gated model, at each budget, and with CCT at the largest in the "dense" form,
        which computes everything and masks:

        - `model`, `budget` (None without budgets), `execution` (with CCT);
        - `compute_fraction`: with budgets, the mean over the sequences;
        - `milliseconds`: the median; `spread`: half the distance of the quartiles in per cent of it;
        - `ratio`: the median of the ratios to the plain model, turn by turn.

    Raises:
        ValueError: budgets that the model does not know, or has none; `turns` below 2.
    """
    config = model.config
    if budgets is not None and not config.listed_budgets:
        raise ValueError(f"budgets need a model that has some (got {list(budgets)}); leave them out.")
    chosen = config.listed_budgets if budgets is None else list(budgets)
    before = config.cct_execution
    try:
        with in_eval_mode(model), _many_graphs() if compiled else nullcontext():
            rows, runs = _rows_and_runs(model, batch, chosen, compiled)
            times = timing.compare(
                {str(i): run for i, run in enumerate(runs)}, turns=turns, title="benchmark"
            )
    finally:
        if config.has_cct:
            model.set_cct_execution(before)
    return [
        row | {"milliseconds": time.value, "spread": time.spread, "ratio": time.ratio}
        for row, time in zip(rows, times, strict=True)
    ]


def _many_graphs() -> AbstractContextManager[None]:
    """The plain model, and each budget and execution of the gated one, have the same code."""
    return torch._dynamo.config.patch(recompile_limit=64)


def _rows_and_runs(
    model: GatedPreTrainedModel,
    batch: Mapping[str, Tensor],
    chosen: list[Any],
    compiled: bool,
) -> tuple[list[dict[str, Any]], list[Callable[[], object]]]:
    """What to time, and what the table says of each."""
    config = model.config
    timed = timing.compiled if compiled else lambda module: module
    plain: nn.Module = plain_model(model)
    plain = plain.to(model.device, model.dtype).eval()
    name = f"{type(model).__name__} without gates"
    rows = [{"model": name, "budget": None, "execution": None, "compute_fraction": None}]
    runs: list[Callable[[], object]] = [partial(timed(plain), **batch)]
    before, gated = config.cct_execution, timed(model)

    def run(execution: str, arguments: dict[str, Any]) -> Any:
        if config.has_cct and config.cct_execution != execution:
            model.set_cct_execution(execution)
        return gated(**arguments)

    for budget in chosen or [None]:
        arguments = dict(batch) if budget is None else {**batch, "budget": budget}
        # the largest budget in both forms: what the gates cost, and what skipping brings back
        for execution in dict.fromkeys(
            ("dense", before) if config.has_cct and budget == chosen[0] else (before,)
        ):
            runs.append(partial(run, execution, arguments))
            fraction = getattr(runs[-1](), "compute_fraction", None)
            rows.append(
                {
                    "model": type(model).__name__,
                    "budget": budget,
                    "execution": execution if config.has_cct else None,
                    "compute_fraction": None if fraction is None else fraction.mean().item(),
                }
            )
    return rows, runs


def plain_model(model: GatedPreTrainedModel) -> PreTrainedModel:
    """A model of the same class and sizes without gates and budgets, with random weights."""
    dropped = {*field_names(), "model_type", "architectures", "auto_map"}
    sizes = {name: value for name, value in model.config.to_dict().items() if name not in dropped}
    config: Any = type(model.config)(**sizes)
    config._attn_implementation = model.config._attn_implementation
    return type(model)(config)
