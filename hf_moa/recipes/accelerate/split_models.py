"""Accelerate's part in training a model that transformers' engine splits over processes.

Accelerate refuses models whose parameters are `DTensor`s, except under its own FSDP. transformers'
Trainer goes around that in the same way as this file: the model places its parts and reduces its
gradients itself, and Accelerate brings the data, mixed precision and the states of random generators.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from accelerate.utils.operations import recursively_apply
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from transformers.distributed.checkpoint import _redistribute_state_dict

from hf_moa.modeling.core.sharding import FSDPModule

from ..splitting import SplitArguments
from .arguments import SHARDING
from .checkpoints import MODEL_PARTS

_OPTIMIZER_PARTS = "optimizer_parts"
# by names of parameters: how these are grouped follows from the split
_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


class SplitAccelerator(Accelerator):
    """An `Accelerator` for one model of `split_model` and its optimiser.

    Its `num_processes` and `process_index` are those of the data: the processes of one `tp_size` share
    each batch, and what they gather of it counts once. Checkpoints hold the parts of all processes
    (`torch.distributed.checkpoint`), to be loaded in any number of them.

    Args:
        sizes: over how many processes the model is split.
        options: of `Accelerator`.

    Raises:
        ValueError: there are not as many processes; or Accelerate is to shard the model, too.
    """

    def __init__(self, sizes: SplitArguments, **options: Any):
        self.sizes = sizes
        super().__init__(**options)
        if self.distributed_type in SHARDING:
            raise ValueError(
                f"{', '.join(sizes.given)} must be left out under {self.distributed_type.value} of "
                "Accelerate, which shards the model itself: choose one of the two."
            )
        needed = sizes.tp_size * sizes.fsdp_size * sizes.dp_replicate_size
        if needed != self.state.num_processes:
            raise ValueError(
                "`tp_size` * `fsdp_size` * `dp_replicate_size` must be the number of processes (got "
                f"{needed} and {self.state.num_processes}): torchrun starts as many."
            )

    @property
    def num_processes(self) -> int:
        return self.state.num_processes // self.sizes.tp_size

    @property
    def process_index(self) -> int:
        return self.state.process_index // self.sizes.tp_size

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> nn.Module:
        # no wrapper, but mixed precision and compilation
        return super().prepare_model(model, device_placement=False, evaluation_mode=True)

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """As in transformers' Trainer: if shards have copies (HSDP), only the sum over these waits."""
        if not isinstance(model, FSDPModule):
            yield
            return
        is_copied = self.sizes.dp_replicate_size > 1
        wait = model.set_requires_all_reduce if is_copied else model.set_requires_gradient_sync
        wait(False)
        try:
            yield
        finally:
            wait(True)

    def gather(self, tensor: Any) -> Any:
        return recursively_apply(self._of_each_batch, super().gather(tensor))

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        found = super().reduce(tensor, reduction, scale)
        copies = 1 if reduction == "mean" else self.sizes.tp_size
        return recursively_apply(lambda x: x if copies == 1 else _divided(x, copies), found)

    def _of_each_batch(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(0, (self.state.num_processes, -1))[:: self.sizes.tp_size].flatten(0, 1)

    def save_state(self, output_dir: str, **options: Any) -> None:
        with self._without_parts():
            super().save_state(output_dir, **options)
        for name, state in self._parts().items():
            dcp.save(_redistribute_state_dict(state), checkpoint_id=Path(output_dir, name))

    def load_state(self, input_dir: str, **options: Any) -> None:
        with self._without_parts():
            super().load_state(input_dir, **options)
        parts = self._parts()
        for name, placed in parts.items():
            state = _redistribute_state_dict(placed)
            # an optimiser has nothing of parameters that never had a gradient
            planner = DefaultLoadPlanner(allow_partial_load=name == _OPTIMIZER_PARTS)
            dcp.load(state, checkpoint_id=Path(input_dir, name), planner=planner)
            parts[name] = _redistribute_state_dict(state, reference_state_dict=placed)
        set_model_state_dict(self._models[0], parts[MODEL_PARTS])
        set_optimizer_state_dict(
            self._models[0],
            self._optimizers[0].optimizer,
            parts[_OPTIMIZER_PARTS],
            options=_OPTIONS,
        )

    def _parts(self) -> dict[str, dict[str, Any]]:
        """What this process has of the model and of its optimiser, by folder."""
        model, optimizer = self._models[0], self._optimizers[0].optimizer
        return {
            MODEL_PARTS: get_model_state_dict(model),
            _OPTIMIZER_PARTS: get_optimizer_state_dict(model, optimizer, options=_OPTIONS),
        }

    @contextlib.contextmanager
    def _without_parts(self) -> Iterator[None]:
        """Accelerate would write what the first process has of the model, and load that everywhere."""
        hidden = {name: self.__dict__[name] for name in ("_models", "_optimizers")}
        self.__dict__.update({name: [] for name in hidden})
        try:
            yield
        finally:
            self.__dict__.update(hidden)


def _divided(x: torch.Tensor, by: int) -> torch.Tensor:
    return x / by if x.is_floating_point() else x // by
