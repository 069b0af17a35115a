"""The optimisers of the loop."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from hf_moa.modeling.core.sharding import mesh_of
from hf_moa.training import gate_parameters
from hf_moa.training.adafactor import SMALLEST_SIZE
from hf_moa.training.parameter_groups import give_own_rates

from .arguments import AccelerateArguments


def make_optimizer(
    args: AccelerateArguments, model: nn.Module, accelerator: Accelerator, *, gates: bool
) -> torch.optim.Optimizer:
    """AdamW or Adafactor, over parameters that are trained; weight decay not for biases and norms.

    Args:
        gates: whether MAE's gates are among them (block coordinate descent has an optimiser of its own).

    Raises:
        ValueError: Adafactor, whose steps follow from whole weights, where weights are in shards.
    """
    optimizer = _new_optimizer(
        args, _parameter_groups(model, args.weight_decay, gates=gates), accelerator
    )
    give_own_rates(optimizer, model, args, with_gates=gates)
    return optimizer


class SchedulePlace:
    """Where a schedule of learning rates is: its state, except what it has of each group of parameters.
    A model that is split in another way may have more of them, or fewer."""

    def __init__(self, scheduler: LRScheduler):
        self.scheduler = scheduler

    def state_dict(self) -> dict[str, int]:
        return {"last_epoch": self.scheduler.last_epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.scheduler.last_epoch = state["last_epoch"]


def _new_optimizer(
    args: AccelerateArguments, groups: list[dict], accelerator: Accelerator
) -> torch.optim.Optimizer:
    if args.optim == "adamw":
        return torch.optim.AdamW(groups, lr=args.learning_rate, betas=(0.9, args.adam_beta2))
    what_shards = args.what_shards(accelerator.distributed_type)
    if what_shards is not None:
        raise ValueError(
            "`optim` adafactor takes a weight's size and its rows' and columns' means from the whole "
            f"weight, which no process has under {what_shards} (got optim="
            "adafactor). Choose adamw, or train without shards."
        )
    return torch.optim.Adafactor(groups, lr=args.learning_rate, eps=(None, SMALLEST_SIZE))


def _parameter_groups(model: nn.Module, weight_decay: float, *, gates: bool) -> list[dict]:
    out = set() if gates else {id(p) for p in gate_parameters(model)}
    groups: dict[tuple[bool, Any], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in out:
            # experts' biases are of two dimensions
            is_weight = parameter.ndim >= 2 and not name.endswith("bias")
            # one step of an optimiser takes no parameters of several meshes
            groups.setdefault((is_weight, mesh_of(parameter)), []).append(parameter)
    return [
        {"params": parameters, "weight_decay": weight_decay if is_weight else 0.0}
        for (is_weight, _), parameters in groups.items()
    ]
