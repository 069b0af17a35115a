"""A card from a `Trainer`: its data, arguments, logs and measurements."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard
from transformers import Trainer, TrainingArguments
from transformers.modelcard import extract_hyperparameters_from_trainer
from transformers.utils import logging

from hf_moa.environment import device_name

from .adapter import base_beside, peft_method, trained_in_words
from .card import model_card
from .existing import base_on_hub, merged_card, read_card, write_card
from .facts import (
    DataUsed,
    TrainingFacts,
    eval_results,
    hub_name,
    in_words,
    is_hub_id,
    named_metrics,
    package_versions,
)
from .loading import class_of, task_of

logger = logging.get_logger(__name__)

_HUB_FILE = re.compile(r"hf://datasets/([^@]+)@([^/]+)/")


def write_trainer_card(trainer: Trainer, folder: str | Path, **facts: Any) -> None:
    """Write `trainer_card(trainer, **facts)` to README.md in a folder, with what a card there knows
    alone (`merged_card`). A card there that cannot be read stays as it is."""
    path = Path(folder, "README.md")
    try:
        old = read_card(path)
    except ValueError as error:
        logger.warning(f"No model card was written. {error}")
        return
    facts.setdefault("folder", folder)
    if facts.get("model_name") is None and _repository(trainer) is None:
        facts["model_name"] = Path(folder).absolute().name
    if facts.get("tasks") is None and old is not None:
        facts["tasks"] = old.data.pipeline_tag  # what somebody said, where the class only suggests
    card = trainer_card(trainer, **facts)
    is_trained = trainer.state.global_step > 0
    write_card(merged_card(card, old, same_weights=not is_trained), path)


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
        model_name: default: that of the Hub repository, or of the output folder.
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
    wrapped = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    peft_configs = getattr(wrapped, "peft_config", None)
    model = wrapped.get_base_model() if hasattr(wrapped, "get_base_model") else wrapped
    config = model.config
    name = _name(trainer, model_name)
    task = next(iter(_listed(tasks)), None) or task_of(config, class_of(config, type(model)))
    training = [
        *_data_used("training", trainer.train_dataset),
        *_data_used("evaluation", trainer.eval_dataset),
    ]
    named = _named_data(_listed(dataset_tags), _listed(dataset), _listed(dataset_args))
    training = [_with_name(used, named) for used in training]
    # an evaluation may have been given its data when it was called
    evaluated = [used for used in training if used.use == "evaluation"] or named
    method = peft_method(peft_configs)
    base = finetuned_from or getattr(config, "_name_or_path", None)
    base_folder = None
    if method is None:
        base = base_model_of(base)
    else:  # the very model that the adapter is loaded onto, and not what that one came from
        adapted = next(iter(peft_configs.values())).base_model_name_or_path or base
        base, base_folder = hub_name(adapted), base_beside(folder or trainer.args.output_dir, adapted)
    is_trained = trainer.state.global_step > 0
    return model_card(
        config,
        name=name,
        model_class=type(model),
        license=license,
        base_model=None if base == name else base,  # where a model goes back to its repository
        datasets=list(dict.fromkeys(d.dataset for d in [*named, *training] if d.dataset)),
        language=language,
        tags=list(dict.fromkeys([*_listed(tags), "generated_from_trainer"])),
        task=task,
        results=_results(trainer, task, evaluated[0] if len(evaluated) == 1 else None),
        training=TrainingFacts(
            data=tuple(training),
            hyperparameters=_hyperparameters(trainer),
            versions=package_versions(is_adapter=method is not None),
            history=history_of(trainer.state.log_history),
        )
        if is_trained
        else None,
        budget_rows=getattr(trainer, "budget_rows", None) or (),
        measured_on=_machine(trainer),
        expert_load=getattr(trainer, "expert_load", None),
        adapter=method,
        adapter_trains=trained_in_words(peft_configs),
        base_folder=base_folder,
        carries_code=base_folder is None,
        has_tokenizer=_has_tokenizer(trainer),
    )


def _repository(trainer: Trainer) -> str | None:
    """The model's id on the Hub, where it has one."""
    return trainer.hub_model_id or trainer.args.hub_model_id


def _name(trainer: Trainer, model_name: str | None) -> str:
    """The model's id on the Hub, unless a name is given that is another's; else that of the folder."""
    repository = _repository(trainer)
    if repository and model_name in (None, repository.split("/")[-1]):
        return repository
    return model_name or Path(trainer.args.output_dir).absolute().name


def base_model_of(name_or_path: str | None) -> str | None:
    """The id of a base model on the Hub: the name, or what a card at that path says; else None."""
    if not name_or_path or not Path(name_or_path).exists():
        return hub_name(name_or_path)
    try:
        card = read_card(Path(name_or_path, "README.md"))
    except ValueError:
        return None
    return base_on_hub(card)


def history_of(log: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
    """A row per evaluation during training, of `state.log_history`: step, epoch, losses, metrics."""
    rows: dict[int, dict[str, Any]] = {}
    loss = None
    for entry in _until_end(log):
        loss = entry.get("loss", loss)
        metrics = _evaluation(entry)
        if metrics:
            row = {"step": entry.get("step"), "epoch": entry.get("epoch"), "training loss": loss}
            rows.setdefault(entry.get("step"), row).update(in_words(metrics))
    return tuple(rows.values())


def final_metrics(
    log: Sequence[Mapping[str, Any]], *, step: int, loaded_step: int | None = None
) -> list[tuple[str, str, float | int]]:
    """The metrics of the very weights that a run left, as `named_metrics` has them.

    Args:
        log: `state.log_history`.
        step: the last step: evaluations at it count, and most those after the end of training.
        loaded_step: the step whose weights were loaded at the end of training, in their place.
    """
    end = len(_until_end(log))
    entries = [entry for entry in log[end:] if entry.get("step") == step and _evaluation(entry)]
    if not entries:
        measured = step if loaded_step is None else loaded_step
        entries = [entry for entry in log[:end] if entry.get("step") == measured]
    merged = {metric[:2]: metric[2] for entry in entries for metric in _evaluation(entry)}
    return [(*names, value) for names, value in merged.items()]


def _until_end(log: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The log up to the last end of training; all of it where training did not end."""
    ends = [i for i, entry in enumerate(log) if "train_runtime" in entry]
    return list(log[: ends[-1]] if ends else log)


def _evaluation(entry: Mapping[str, Any]) -> list[tuple]:
    """The metrics of a log entry, if it is an evaluation's."""
    is_evaluation = any(key.endswith("_runtime") and key != "train_runtime" for key in entry)
    return [metric for metric in named_metrics(entry) if metric[0]] if is_evaluation else []


def _results(trainer: Trainer, task: str, data: DataUsed | None) -> list[EvalResult]:
    state = trainer.state
    loaded = state.best_global_step if trainer.args.load_best_model_at_end else None
    metrics = final_metrics(state.log_history, step=state.global_step, loaded_step=loaded)
    return eval_results(metrics, task=task, data=data)


def _listed(value: str | Sequence[str] | None) -> list[str]:
    if value is None:
        return []
    return [value] if isinstance(value, str) else list(value)


def _named_data(ids: list, names: list, configs: list) -> list[DataUsed]:
    """The data sets that the caller named."""
    count = max(len(ids), len(names))
    ids, names, configs = (each + [None] * (count - len(each)) for each in (ids, names, configs))
    return [
        DataUsed(use="", dataset=i if is_hub_id(i) else None, name=n or i, config=c)
        for i, n, c in zip(ids, names, configs[:count], strict=True)
    ]


def _with_name(used: DataUsed, named: list[DataUsed]) -> DataUsed:
    """The data that a trainer holds, under the one name that the caller gave."""
    if len(named) != 1:
        return used
    return DataUsed(
        use=used.use,
        name=named[0].name,
        dataset=named[0].dataset or used.dataset,
        config=named[0].config or used.config,
        split=used.split,
        revision=used.revision if named[0].dataset in (None, used.dataset) else None,
        examples=used.examples,
    )


def _data_used(use: str, dataset: Any) -> list[DataUsed]:
    """What can be told of a data set, or of a dict of several."""
    if dataset is None:
        return []
    if isinstance(dataset, Mapping) and not hasattr(dataset, "column_names"):
        return [used for part in dataset.values() for used in _data_used(use, part)]
    try:
        examples = len(dataset)
    except TypeError:  # a stream
        examples = None
    info = getattr(dataset, "info", None)
    files = getattr(info, "download_checksums", None) or {}
    found = next((match for match in map(_HUB_FILE.match, map(str, files)) if match), None)
    if found is None:
        return [DataUsed(use=use, examples=examples)]
    config, split = getattr(info, "config_name", None), getattr(dataset, "split", None)
    return [
        DataUsed(
            use=use,
            dataset=found[1],
            config=None if config == "default" else config,
            split=None if split is None else str(split),
            revision=found[2],
            examples=examples,
        )
    ]


def _hyperparameters(trainer: Trainer) -> dict[str, Any]:
    args, state = trainer.args, trainer.state
    found = extract_hyperparameters_from_trainer(trainer)
    found |= {
        "optimizer": _optimizer(args),
        "weight_decay": args.weight_decay,
        "max_grad_norm": args.max_grad_norm,
    }
    if args.warmup_steps:  # below 1 a share of all steps
        found["lr_scheduler_warmup_steps"] = args.get_warmup_steps(state.max_steps)
    if args.bf16:
        found["mixed_precision_training"] = "bfloat16"
    mae_training = getattr(trainer, "mae_training", None)
    gates: dict[str, Any] = {"mae_training": mae_training}
    if mae_training == "bcd":
        names = ("gate_every_n_epochs", "gate_epoch_steps", "gate_learning_rate")
        gates |= {name: getattr(args, name) for name in names}
    gates["cct_noise_steps"] = getattr(trainer, "cct_noise_steps", None)
    if args.world_size > 1:
        gates |= {
            name: getattr(args, name, None) for name in ("sync_gate_norm", "router_global_balance")
        }
    found |= {name: value for name, value in gates.items() if value is not None}
    return found | {"steps_done": state.global_step, "epochs_done": state.epoch}


def _optimizer(args: TrainingArguments) -> str:
    text = str(getattr(args.optim, "value", args.optim))
    if "adam" in text:
        text += f", betas ({args.adam_beta1:g}, {args.adam_beta2:g}), epsilon {args.adam_epsilon:g}"
    return f"{text}, {args.optim_args}" if args.optim_args else text


def _machine(trainer: Trainer) -> str:
    where = device_name(trainer.args.device)
    processes = f", {trainer.args.world_size} processes" if trainer.args.world_size > 1 else ""
    return f"{where}{processes}, {trainer.args.per_device_eval_batch_size} rows a batch"


def _has_tokenizer(trainer: Trainer) -> bool:
    collator = getattr(trainer.data_collator, "tokenizer", None)
    return trainer.processing_class is not None or collator is not None
