"""What TensorBoard and W&B get of a run beside numbers: histograms of the gates; and one event file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from transformers import TrainerCallback
from transformers.integrations import TensorBoardCallback
from transformers.integrations.integration_utils import default_logdir


class OneFileTensorBoard(TensorBoardCallback):
    """transformers' callback. Its file stays open behind the training, for evaluations that follow; and
    without a training it is in `output_dir`, too."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if self.logging_dir is None:
            self.logging_dir = os.path.join(args.output_dir, default_logdir())
        super().on_log(args, state, control, logs, **kwargs)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_hyper_param_search:  # each trial has a file
            super().on_train_end(args, state, control, **kwargs)
        elif self.tb_writer is not None:
            self.tb_writer.flush()


def with_one_file(callbacks: Iterable[TrainerCallback]) -> list[TrainerCallback]:
    """The callbacks, with `OneFileTensorBoard` instead of transformers'."""
    return [
        OneFileTensorBoard(callback.tb_writer) if type(callback) is TensorBoardCallback else callback
        for callback in callbacks
    ]


def report_histograms(trackers: Iterable[Any], histograms: Mapping[str, list[float]], step: int) -> None:
    """Give histograms to the trackers that have such: TensorBoard and W&B.

    Args:
        trackers: callbacks of `Trainer`, or trackers of Accelerate.
        histograms: name -> the values.
        step: updates done.
    """
    named = {f"train/{name}": values for name, values in histograms.items()}
    for tracker in trackers:
        writer = getattr(tracker, "tb_writer", None) or getattr(tracker, "writer", None)
        if writer is not None and named:
            for name, values in named.items():
                writer.add_histogram(name, np.asarray(values), step)
            writer.flush()
        wandb: Any = getattr(tracker, "_wandb", None)
        if getattr(wandb, "run", None) is not None and named:
            wandb.log(
                {name: wandb.Histogram(x) for name, x in named.items()} | {"train/global_step": step}
            )


def store_configuration(tracker: Any, values: dict[str, Any]) -> None:
    """Give a run's settings to one of Accelerate's trackers; to TensorBoard as text, since Accelerate
    would make a second event file of them."""
    if getattr(tracker, "name", None) == "tensorboard":
        tracker.writer.add_text("args", json.dumps(values, indent=1, default=str))
    else:
        tracker.store_init_configuration(values)
