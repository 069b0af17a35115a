"""Quality, measured compute and time of one model at each of its budgets.

rows = evaluate_budgets(trainer)
print(format_budget_table(rows))
"""

import itertools
import logging
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import Trainer
from transformers.trainer_pt_utils import find_batch_size

from hf_moa.markdown import union_table
from hf_moa.modeling.core.precision import on_device

logger = logging.getLogger(__name__)

Budget = float | tuple[float, float]

# Trainer's own timing entries: `seconds` is measured here, and its rates follow from it.
_SPEED_SUFFIXES = (
    "_runtime",
    "_samples_per_second",
    "_steps_per_second",
    "_model_preparation_time",
    "_jit_compilation_time",
)


def _as_budget(budget) -> Budget:
    # A pair (encoder, decoder) comes back from a saved config as a list.
    return tuple(budget) if isinstance(budget, list | tuple) else budget


def _size(budget: Budget) -> float:
    return sum(budget) if isinstance(budget, tuple) else budget


class _ComputeFractionRecorder:
    """Collects the output field `compute_fraction` of every forward call inside a `with` block.

    The field is in `config.keys_to_ignore_at_inference`, so `Trainer` does not hand it out itself. The
    processes exchange nothing until the end: their generations differ in length.

    Args:
        model: the bare model, which a wrapper's `generate` calls, too.
    """

    def __init__(self, model: torch.nn.Module, trainer: Trainer):
        self.model, self.trainer = model, trainer
        self.fractions: list[torch.Tensor] = []

    def _step(self, model, inputs, *args, **kwargs):
        self.batch_size = find_batch_size(inputs)
        return self.prediction_step(model, inputs, *args, **kwargs)

    def _record(self, module, args, output) -> None:
        fraction = getattr(output, "compute_fraction", None)
        if fraction is not None:
            # a search has several entries for each sequence
            count = len(fraction) * self._num_sequences() // self.batch_size
            self.fractions.append(fraction.detach()[:count])

    def _num_sequences(self) -> int:
        """Of this batch, without those that are repeated to fill the last batch of all processes."""
        accelerator = self.trainer.accelerator
        state = accelerator.gradient_state
        if accelerator.num_processes == 1 or not state.end_of_dataloader or state.remainder <= 0:
            return self.batch_size
        left = state.remainder - accelerator.process_index * self.batch_size
        return min(max(left, 0), self.batch_size)

    def __enter__(self):
        self._handle = self.model.register_forward_hook(self._record)
        self.prediction_step = self.trainer.prediction_step
        self._own = vars(self.trainer).get("prediction_step")
        self.trainer.prediction_step = self._step  # type: ignore[method-assign]  # until the exit
        return self

    def __exit__(self, *exc_info):
        self._handle.remove()
        del self.trainer.prediction_step  # a bound method would keep the trainer and its model alive
        if self._own is not None:
            self.trainer.prediction_step = self._own  # type: ignore[method-assign]  # back

    def mean(self) -> float:
        """The mean over sequences (not over batches, whose sizes differ), of all processes."""
        accelerator = self.trainer.accelerator
        fractions = torch.cat([torch.zeros(0), *(fraction.cpu() for fraction in self.fractions)])
        total = torch.tensor([fractions.double().sum(), len(fractions)], dtype=torch.float64)
        if accelerator.num_processes > 1:
            total = accelerator.reduce(on_device(total, accelerator.device), reduction="sum")
        if total[1] == 0:
            raise ValueError(
                f"{type(self.model).__name__} returned no `compute_fraction`. Its outputs must be "
                "ModelOutputs with that field (`config.return_dict=True`)."
            )
        return (total[0] / total[1]).item()


def evaluate_budgets(
    trainer: Trainer,
    eval_dataset=None,
    budgets: Sequence[Budget] | None = None,
    metric_key_prefix: str = "eval",
) -> list[dict]:
    """Evaluates the trainer's model once at each budget.

    Args:
        trainer: a `Trainer` whose model has budgets, nested or CCT's.
        eval_dataset: the dataset; default: `trainer.eval_dataset`.
        budgets: the budgets, each one of `model.config.listed_budgets`; default: each of those once,
            largest first.
        metric_key_prefix: prefix of the metrics' names.

    Returns:
        One dict per budget, in the given order:

        - `budget`: the budget;
        - `compute_fraction`: the share of the gated computation that was carried out, as the model
          measures it, averaged over the sequences (with generation: over forward calls and
          sequences);
        - `seconds`: wall-clock time of the whole prediction loop, data loading, transfers and
          metrics included, after one untimed batch at the same budget. On a busy machine, or with
          a model so small that the loop's own cost dominates, it says little about the model;
        - the loss and whatever the trainer's `compute_metrics` returns, under
          `{metric_key_prefix}_...`.

        Afterwards the model is at its default budget (`set_budget(None)`), also when an error
        ended the evaluation. The trainer keeps the rows as `budget_rows`, for its model card, and logs
        them, under names such as `eval_budget_0.5_accuracy`.

    Where the gates compute more than 0.1 above a budget, a warning says so, and what to change.

    Raises:
        ValueError: the model has no budgets; a budget is not one of them; `budgets`
            is empty; there is no evaluation dataset, or several.
    """
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    fields = (getattr(model.config, name, None) for name in ("nested_budgets", "cct_budgets"))
    trained_budgets = next(filter(None, fields), None)
    if not trained_budgets:
        raise ValueError(
            "`evaluate_budgets` needs a model with budgets (`config.nested_budgets` or "
            f"`config.cct_budgets` set; got a {type(model).__name__} without). "
            "`upcycle(model, nested_budgets=[...])` adds them."
        )
    eval_dataset = trainer.eval_dataset if eval_dataset is None else eval_dataset
    if eval_dataset is None or isinstance(eval_dataset, dict):
        raise ValueError(
            "`eval_dataset` must be one dataset, given here or to the trainer "
            f"(got {'a dict of datasets' if eval_dataset is not None else None})."
        )
    trained_budgets = sorted({_as_budget(b) for b in trained_budgets}, key=_size, reverse=True)
    budgets = trained_budgets if budgets is None else [_as_budget(b) for b in budgets]
    if not budgets:
        raise ValueError(f"`budgets` must name at least one of {trained_budgets} (got {budgets}).")

    first_batch_size = trainer.args.eval_batch_size * trainer.args.world_size
    first_batch = _first(eval_dataset, first_batch_size)
    rows = []
    try:
        for budget in budgets:
            model.set_budget(budget)
            _warm_up(trainer, first_batch)
            with _ComputeFractionRecorder(model, trainer) as recorder:
                start = time.perf_counter()
                metrics = trainer.predict(eval_dataset, metric_key_prefix=metric_key_prefix).metrics
                seconds = time.perf_counter() - start
            rows.append(
                {
                    "budget": budget,
                    "compute_fraction": recorder.mean(),
                    "seconds": seconds,
                    **{k: v for k, v in (metrics or {}).items() if not k.endswith(_SPEED_SUFFIXES)},
                }
            )
    finally:
        model.set_budget(None)
    warn_of_excess({row["budget"]: row["compute_fraction"] for row in rows}, model.config)
    _log(trainer, rows, metric_key_prefix)
    trainer.budget_rows = rows  # type: ignore[attr-defined]  # a plain `Trainer` carries it too
    return rows


def _log(trainer: Trainer, rows: Sequence[dict], prefix: str) -> None:
    """Give the rows to the trainer's log and trackers: `eval_budget_0.5_accuracy`."""
    logs = {}
    for row in rows:
        budget = row["budget"]
        numbers = budget if isinstance(budget, tuple) else (budget,)
        name = f"{prefix}_budget_{'_'.join(f'{number:g}' for number in numbers)}"
        for key, value in row.items():
            if key not in ("budget", "seconds") and isinstance(value, (int, float)):
                logs[f"{name}_{key.removeprefix(f'{prefix}_')}"] = value
    trainer.log(logs)


# how far above a budget the computed share may be before it is said
_EXCESS = 0.1


def warn_of_excess(computed: dict[Any, float], config: Any) -> None:
    """Warn of budgets that CCT's gates do not keep.

    Args:
        computed: budget -> the share that was computed; pairs are not looked at.
        config: of the model. Nested budgets are what they are: there is no warning.
    """
    above = [
        f"{share:.2f} at budget {budget:g}"
        for budget, share in computed.items()
        if not isinstance(budget, tuple) and share > budget + _EXCESS
    ]
    if above and getattr(config, "cct_budgets", None):
        logger.warning(
            f"The gates compute {', '.join(above)}: more than {_EXCESS:g} above. Train longer, with "
            "budget_sampling='all', a higher budget_bias_learning_rate or gate_learning_rate, or a "
            f"higher cct_budget_loss_coef (it is {config.cct_budget_loss_coef})."
        )


def _first(dataset: Any, count: int) -> Any:
    """The first examples; those of a `datasets.Dataset` keep its columns, by one of which `Trainer` may
    group them."""
    if hasattr(dataset, "select"):
        return dataset.select(range(min(count, len(dataset))))
    return list(itertools.islice(iter(dataset), count))


def _warm_up(trainer: Trainer, batch: Any) -> None:
    # Without the metrics: some are undefined on a few examples.
    compute_metrics, trainer.compute_metrics = trainer.compute_metrics, None
    try:
        trainer.predict(batch)
    finally:
        trainer.compute_metrics = compute_metrics


def format_budget_table(rows: Sequence[dict]) -> str:
    """The rows of `evaluate_budgets` as a Markdown table, floats with four significant digits.

    Raises:
        ValueError: there are no rows.
    """
    if not rows:
        raise ValueError("`rows` must hold at least one row of `evaluate_budgets` (got none).")
    return union_table(rows)
