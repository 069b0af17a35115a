"""How a model was trained, as plain data: on which data sets, with which hyperparameters."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from transformers import Trainer
from transformers.modelcard import extract_hyperparameters_from_trainer
from transformers.trainer_utils import has_length

if TYPE_CHECKING:
    from .training.trainer_base import RunArguments

_HUB_FILE = re.compile(r"hf://datasets/([^@]+)@([^/]+)/")


@dataclass(frozen=True, kw_only=True)
class DataUsed:
    """A data set and what it was used for.

    Attributes:
        use: "training" or "evaluation".
        name: in words.
        dataset: its id on the Hub.
        config, split, revision: which part of it, as `datasets.load_dataset` names them.
        examples: how many there were.
    """

    use: str
    name: str | None = None
    dataset: str | None = None
    config: str | None = None
    split: str | None = None
    revision: str | None = None
    examples: int | None = None


@dataclass(frozen=True, kw_only=True)
class TrainingFacts:
    """How a model was trained.

    Attributes:
        data: the data sets.
        hyperparameters: by name.
        versions: package -> version that it was trained with.
        history: one row per evaluation during training: `step`, `epoch`, `training loss`, metrics.
    """

    data: tuple[DataUsed, ...] = ()
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    history: tuple[Mapping[str, Any], ...] = ()


def data_used(use: str, dataset: Any, named: Sequence[DataUsed]) -> list[DataUsed]:
    """What can be told of a data set, or of a dict of several; under the one name that was given."""
    if dataset is None:
        return []
    if isinstance(dataset, Mapping) and not hasattr(dataset, "column_names"):
        return [used for part in dataset.values() for used in data_used(use, part, named)]
    used = DataUsed(use=use, examples=len(dataset) if has_length(dataset) else None)
    info = getattr(dataset, "info", None)
    files = getattr(info, "download_checksums", None) or {}
    found = next((match for match in map(_HUB_FILE.match, map(str, files)) if match), None)
    if found is not None:
        config, split = getattr(info, "config_name", None), getattr(dataset, "split", None)
        config = None if config == "default" else config
        split = None if split is None else str(split)
        used = replace(used, dataset=found[1], revision=found[2], config=config, split=split)
    if len(named) != 1:
        return [used]
    given = {field: value for field, value in vars(named[0]).items() if value is not None}
    if given.get("dataset", used.dataset) != used.dataset:
        given["revision"] = None
    return [replace(used, **given | {"use": use})]


def trainer_hyperparameters(trainer: Trainer) -> dict[str, Any]:
    """Those that transformers' cards show, and more: what the gates' training depends on."""
    state, args = trainer.state, cast("RunArguments", trainer.args)
    optimizer = str(getattr(args.optim, "value", args.optim))
    if "adam" in optimizer:
        optimizer += f", betas ({args.adam_beta1:g}, {args.adam_beta2:g}), epsilon {args.adam_epsilon:g}"
    found = extract_hyperparameters_from_trainer(trainer) | {
        "optimizer": f"{optimizer}, {args.optim_args}" if args.optim_args else optimizer,
        "weight_decay": args.weight_decay,
        "max_grad_norm": args.max_grad_norm,
    }
    if args.warmup_steps:  # below 1 a share of all steps
        found["lr_scheduler_warmup_steps"] = args.get_warmup_steps(state.max_steps)
    if args.bf16:
        found["mixed_precision_training"] = "bfloat16"
    found["mae_training"] = getattr(trainer, "mae_training", None)
    found["gate_learning_rate"] = getattr(args, "gate_learning_rate", None)
    if found["mae_training"] == "bcd":
        names: tuple[str, ...] = ("gate_every_n_epochs", "gate_epoch_steps")
        found |= {name: getattr(args, name) for name in names}
        found["gate_learning_rate"] = args.descent_learning_rate
    found["budget_sampling"] = getattr(trainer, "budget_sampling", None)
    found |= _distillation(trainer)
    found["cct_noise_steps"] = getattr(trainer, "cct_noise_steps", None)
    if args.world_size > 1:
        names = ("sync_gate_norm", "router_global_balance")
        found |= {name: getattr(args, name, None) for name in names}
    found |= {"steps_done": state.global_step, "epochs_done": state.epoch}
    return {name: value for name, value in found.items() if value is not None}


def _distillation(trainer: Any) -> dict[str, Any]:
    """How a model was distilled; nothing without a teacher."""
    teacher = getattr(trainer, "teacher", None)
    if teacher is None:
        return {}
    name = teacher if isinstance(teacher, str) else getattr(teacher, "name_or_path", "")
    fields = {"teacher": str(name) or type(teacher).__name__}
    for field_name in ("weight", "temperature"):
        fields[f"distillation_{field_name}"] = getattr(trainer.args, f"distillation_{field_name}")
    return fields | {"distillation_hidden_weight": trainer.hidden_weight}


def state_hyperparameters(state: Mapping[str, Any]) -> dict[str, Any]:
    """What trainer_state.json tells of the training, under the names of `Trainer`'s cards."""
    names = {
        "train_batch_size": "train_batch_size",
        "max_steps": "training_steps",
        "num_train_epochs": "num_epochs",
        "global_step": "steps_done",
        "epoch": "epochs_done",
    }
    return {name: state[key] for key, name in names.items() if state.get(key) is not None}
