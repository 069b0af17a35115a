"""What of a model a script trains: all of it, or a PEFT adapter (FTG, FTG+, or LoRA to compare with)."""

from __future__ import annotations

import copy
import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, TaskType, get_peft_model
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hf_moa import FTGConfig
from hf_moa.adapter_files import BASE_FOLDER
from hf_moa.modeling.ftg.model import selected_modules

from .command_line import optional

logger = logging.getLogger(__name__)

# Fields of a configuration that concern the head, or how a model was saved.
_NOT_OF_BASE: tuple[str, ...] = (
    "architectures",
    "auto_map",
    "dtype",
    "transformers_version",
    "_name_or_path",
)
_NOT_OF_BASE += ("id2label", "label2id", "problem_type", "finetuning_task")
ADAPTERS = ("none", "ftg", "ftg+", "lora", "head")


@dataclass
class AdapterArguments:
    """What of the model to train."""

    adapter: str = field(
        default="none",
        metadata={
            "help": "none: the whole model. ftg: its gates; ftg+: the output projections of its "
            "attention too. lora: low-rank updates of its linear layers. head: no more than the head of "
            "the task, which all others train as well.",
            "choices": ADAPTERS,
        },
    )
    modules_to_save: list[str] | None = field(
        default=None,
        metadata={"help": "Further modules to train whole, such as pooler; with any adapter."},
    )
    adapter_gates: list[str] | None = field(
        default=None,
        metadata={"help": "ftg, ftg+: the gates to train, of mae, router and cct. Default: all."},
    )
    lora_rank: int | None = optional("lora: the rank. Default: the one that matches --lora_match.")
    lora_match: str = field(
        default="ftg",
        metadata={
            "help": "lora: train as nearly as many parameters as this adapter would.",
            "choices": ["ftg", "ftg+"],
        },
    )

    def __post_init__(self):
        if self.adapter not in ADAPTERS:
            raise ValueError(f"`adapter` must be one of {', '.join(ADAPTERS)} (got {self.adapter!r}).")
        if self.modules_to_save is not None and self.adapter == "none":
            raise ValueError(
                f"`modules_to_save` needs an `adapter` (got {self.modules_to_save} with 'none', which "
                "trains everything)."
            )
        if self.adapter_gates is not None and self.adapter not in ("ftg", "ftg+"):
            raise ValueError(
                f"`adapter_gates` is for `adapter` ftg and ftg+ (got {self.adapter_gates} with "
                f"{self.adapter!r})."
            )
        if self.lora_rank is not None and (self.adapter != "lora" or self.lora_rank < 1):
            raise ValueError(
                f"`lora_rank` must be 1 or more, with `adapter` lora (got {self.lora_rank} with "
                f"{self.adapter!r})."
            )


def adapt(
    model: PreTrainedModel, adapter_args: AdapterArguments, task_type: TaskType, output_dir: str | Path
) -> nn.Module:
    """The model with the adapter in it, or as it is.

    A base that is on no disk yet, as one that has just been converted, is saved beside the adapter, to
    `base_model` in `output_dir`: the adapter's files name that folder.

    Raises:
        ValueError: the adapter finds nothing to train in the model.
    """
    if adapter_args.adapter == "none":
        return model
    if adapter_args.adapter == "head":
        return train_head(model, adapter_args.modules_to_save or [])
    if adapter_args.adapter == "lora":
        config: LoraConfig | FTGConfig = lora_config(model, adapter_args, task_type)
    else:
        config = ftg_config(adapter_args, task_type)
    folder = Path(model.name_or_path or "")
    if not _is_stored(model):
        folder = Path(output_dir, BASE_FOLDER)
        model.save_pretrained(folder)
        logger.info(f"The adapter's base model is in {folder}.")
    if folder.is_dir():  # the adapter loads from wherever one is
        model.config.name_or_path = model.name_or_path = str(folder.resolve())
    return get_peft_model(model, config)


def _is_stored(model: PreTrainedModel) -> bool:
    """Whether `name_or_path` gives the model, except for a head, which an adapter has a copy of.

    It does not where the model has been converted, its embeddings resized, a part newly drawn, or a
    field of its configuration set.
    """
    config, name = model.config, model.name_or_path or ""
    try:
        fields = type(config).get_config_dict(name)[0]
    except OSError:
        return False
    if fields.get("model_type") != config.model_type:
        return False
    if _fields_of_base(type(config).from_dict(fields)) != _fields_of_base(config):
        return False
    with torch.random.fork_rng(devices=[]):  # what is drawn here changes no number of the run
        stored = type(model).from_pretrained(
            name, config=copy.deepcopy(config), dtype=model.dtype, ignore_mismatched_sizes=True
        )
    found, expected = (each.base_model.state_dict() for each in (stored, model))
    return found.keys() == expected.keys() and all(
        torch.equal(tensor, found[key].to(tensor.device)) for key, tensor in expected.items()
    )


def _fields_of_base(config: PreTrainedConfig) -> dict[str, Any]:
    """The fields that say what a model computes below its head."""
    fields = json.loads(config.to_json_string(use_diff=False))  # tuples as lists
    return {name: value for name, value in fields.items() if name not in _NOT_OF_BASE}


def train_head(model: PreTrainedModel, further: list[str]) -> PreTrainedModel:
    """The model, with all but its head and the modules of these names frozen."""
    if model.base_model is model:
        raise ValueError(
            f"`adapter` head needs a model with a head of its own, apart from the rest (got "
            f"{type(model).__name__}): choose another adapter."
        )
    model.base_model.requires_grad_(False)
    for name in further:
        found = [m for path, m in model.named_modules() if path == name or path.endswith(f".{name}")]
        if not found:
            raise ValueError(
                f"`modules_to_save` must name modules of the model (got {name!r}, which this "
                f"{type(model).__name__} has not)."
            )
        for module in found:
            module.requires_grad_(True)
    return model


def ftg_config(adapter_args: AdapterArguments, task_type: TaskType) -> FTGConfig:
    chosen: dict[str, Any] = (
        {} if adapter_args.adapter_gates is None else {"gates": adapter_args.adapter_gates}
    )
    return FTGConfig(
        plus=adapter_args.adapter == "ftg+",
        modules_to_save=adapter_args.modules_to_save,
        task_type=task_type,
        **chosen,
    )


def lora_config(
    model: PreTrainedModel, adapter_args: AdapterArguments, task_type: TaskType
) -> LoraConfig:
    """LoRA on the linear layers of the backbone, without its gates."""
    targets = linear_layers(model, adapter_args.modules_to_save or [])
    if not targets:
        raise ValueError(f"`adapter` lora finds no linear layers in this {type(model).__name__}.")
    rank = adapter_args.lora_rank
    if rank is None:
        wanted = ftg_parameters(model, plus=adapter_args.lora_match == "ftg+")
        per_rank = sum(sum(layer.weight.shape) for layer in targets.values())
        rank = max(1, round(wanted / per_rank))
        logger.info(f"LoRA of rank {rank}: {rank * per_rank:,} parameters, for {wanted:,} of FTG's.")
    return LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        lora_dropout=0.1,
        target_modules=list(targets),
        modules_to_save=adapter_args.modules_to_save,
        task_type=task_type,
    )


def linear_layers(model: PreTrainedModel, trained: list[str]) -> dict[str, nn.Linear | Conv1D]:
    """The linear layers of the model, by name, without its head, gates and what is trained whole."""
    is_backbone = model.base_model is model  # as a T5 with a language model's head is
    prefix = "" if is_backbone else f"{model.base_model_prefix}."
    head = model.get_output_embeddings()
    gates = tuple(f"{name}." for name, m in model.named_modules() if hasattr(m, "gate_kind"))
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D))
        and name.startswith(prefix)
        and module is not head
        and not f"{name}.".startswith(gates)
        and not set(trained) & set(name.split("."))
    }


def ftg_parameters(model: PreTrainedModel, *, plus: bool) -> int:
    """How many parameters an FTG or FTG+ adapter of the model has, the head aside."""
    try:
        names = selected_modules(model, FTGConfig(plus=plus))
    except ValueError as error:
        raise ValueError(
            "`adapter` lora matches the parameter count of the model's gates, and this "
            f"{type(model).__name__} has none: give `lora_rank`, or gate the model."
        ) from error
    return sum(p.numel() for name in names for p in model.get_submodule(name).parameters())
