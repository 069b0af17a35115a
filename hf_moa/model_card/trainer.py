"""A card from a `Trainer`: its data, arguments, logs and measurements."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from transformers import Trainer
from transformers.modelcard import extract_hyperparameters_from_trainer
from transformers.trainer_utils import has_length
from transformers.utils import logging

from hf_moa.adapter_files import Adapter
from hf_moa.environment import device_name, package_versions
from hf_moa.run_results import final_metrics, history_of

from .card import model_card
from .existing import base_model_of, merged_card, read_card, write_card
from .facts import (
    DataUsed,
    TrainingFacts,
    eval_results,
    hub_name,
    is_hub_id,
    listed,
)

logger = logging.get_logger(__name__)

_HUB_FILE = re.compile(r"hf://datasets/([^@]+)@([^/]+)/")


def write_trainer_card(trainer: Trainer, folder: str | Path, **facts: Any) -> None:
    """Write `trainer_card(trainer, **facts)` to README.md in a folder, with what only a card there knows
    (`merged_card`). A card there that cannot be read stays as it is."""
    path = Path(folder, "README.md")
    try:
        old = read_card(path)
    except ValueError as error:
        logger.warning(f"No model card was written. {error}")
        return
    if facts.get("tasks") is None and old is not None:
        facts["tasks"] = old.data.pipeline_tag  # what somebody said, where the class only suggests
    card = trainer_card(trainer, **{"folder": folder} | facts)
    write_card(merged_card(card, old, same_weights=trainer.state.global_step == 0), path)


def trainer_card(
    trainer: Trainer,
    *,
    language: str | Sequence[str] | None = None,
    license: str | None = None,
    tags: str | Sequence[str] | None = None,
    model_name: str | None = None,
    finetuned_from: str | None = None,
    tasks: str | Sequence[str] | None = None,
    dataset_tags: str | Sequence[str] | None = None,
    dataset: str | Sequence[str] | None = None,
    dataset_args: str | Sequence[str] | None = None,
    folder: str | Path | None = None,
) -> ModelCard:
    """The card of the gated model that a trainer holds.

    Args:
        trainer: any `Trainer`; a `MoaTrainer` also knows its expert load, and the rows that
            `evaluate_budgets` measured last.
        language, license, tags: for the metadata. There is no default license.
        model_name: default: that of the Hub repository, or of the folder.
        finetuned_from: default: the name that the model was loaded by. A path on this machine stays out
            of the card; the `base_model` of a card at that path is taken.
        tasks: default: what the model's class is for. Of several, the first.
        dataset_tags, dataset, dataset_args: ids on the Hub, names and configurations of the data sets.
            Default: those that the trainer's data sets were loaded from.
        folder: that the model is saved in, beside which an adapter's base may lie. Default: the output
            folder.

    Raises:
        ValueError: the model is not gated; `license` is no identifier.
    """
    args, state = trainer.args, trainer.state
    folder = args.output_dir if folder is None else folder
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    adapter = Adapter.of(model, folder) if getattr(model, "peft_config", None) else None
    name = trainer.hub_model_id or args.hub_model_id
    if not name or model_name not in (None, name.split("/")[-1]):
        name = model_name or Path(folder).absolute().name
    base = finetuned_from or getattr(model.config, "_name_or_path", None)
    if adapter is None:
        base, facts = base_model_of(base), {"model_class": type(model)}
    else:  # the very model that the adapter is loaded onto, and not what that one came from
        base, facts = hub_name(adapter.base or base), adapter.facts()
    named = [
        DataUsed(use="", dataset=each if is_hub_id(each) else None, name=words or each, config=config)
        for each, words, config in zip_longest(*map(listed, (dataset_tags, dataset, dataset_args)))
        if each or words
    ]
    used = _data_used("training", trainer.train_dataset, named)
    used += _data_used("evaluation", trainer.eval_dataset, named)
    # an evaluation may have been given its data when it was called
    evaluated = [each for each in used if each.use == "evaluation"] or named
    task = next(iter(listed(tasks)), None)
    loaded = state.best_global_step if args.load_best_model_at_end else None
    metrics = final_metrics(state.log_history, step=state.global_step, loaded_step=loaded)
    machine = device_name(args.device)
    machine += f", {args.world_size} processes" if args.world_size > 1 else ""
    collator = getattr(trainer.data_collator, "tokenizer", None)
    training = TrainingFacts(
        data=tuple(used),
        hyperparameters=_hyperparameters(trainer),
        versions=package_versions(is_adapter=adapter is not None),
        history=history_of(state.log_history),
    )
    return model_card(
        model.config if adapter is None else adapter.config,
        name=name,
        license=license,
        base_model=None if base == name else base,  # where a model goes back to its repository
        datasets=list(dict.fromkeys(each.dataset for each in [*named, *used] if each.dataset)),
        language=language,
        tags=list(dict.fromkeys([*listed(tags), "generated_from_trainer"])),
        task=task,
        results=eval_results(metrics, task=task, data=evaluated[0] if len(evaluated) == 1 else None),
        training=training if state.global_step > 0 else None,
        budget_rows=getattr(trainer, "budget_rows", None) or (),
        measured_on=f"{machine}, {args.per_device_eval_batch_size} rows a batch",
        expert_load=getattr(trainer, "expert_load", None),
        has_tokenizer=trainer.processing_class is not None or collator is not None,
        **facts,
    )


def _data_used(use: str, dataset: Any, named: Sequence[DataUsed]) -> list[DataUsed]:
    """What can be told of a data set, or of a dict of several; under the one name that was given."""
    if dataset is None:
        return []
    if isinstance(dataset, Mapping) and not hasattr(dataset, "column_names"):
        return [used for part in dataset.values() for used in _data_used(use, part, named)]
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
    given = named[0]
    is_other = given.dataset not in (None, used.dataset)
    return [
        replace(
            used,
            name=given.name,
            dataset=given.dataset or used.dataset,
            config=given.config or used.config,
            revision=None if is_other else used.revision,
        )
    ]


def _hyperparameters(trainer: Trainer) -> dict[str, Any]:
    args, state = trainer.args, trainer.state
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
    if found["mae_training"] == "bcd":
        names = ("gate_every_n_epochs", "gate_epoch_steps", "gate_learning_rate")
        found |= {name: getattr(args, name) for name in names}
    found["cct_noise_steps"] = getattr(trainer, "cct_noise_steps", None)
    if args.world_size > 1:
        names = ("sync_gate_norm", "router_global_balance")
        found |= {name: getattr(args, name, None) for name in names}
    found |= {"steps_done": state.global_step, "epochs_done": state.epoch}
    return {name: value for name, value in found.items() if value is not None}
