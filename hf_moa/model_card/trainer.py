"""A card from a `Trainer`: its data, arguments, logs and measurements."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, cast

from huggingface_hub import ModelCard
from transformers import Trainer
from transformers.utils import logging

from hf_moa.adapter_files import Adapter
from hf_moa.environment import device_name, package_versions
from hf_moa.hub_names import hub_name, is_hub_id
from hf_moa.run_facts import DataUsed, TrainingFacts, data_used, trainer_hyperparameters
from hf_moa.run_results import final_metrics, history_of

from .card import model_card
from .data_and_results import eval_results, listed
from .existing import base_model_of, merged_card, metadata_of, read_card, write_card

logger = logging.get_logger(__name__)


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
        # what somebody said, where the class only suggests
        facts["tasks"] = metadata_of(old).pipeline_tag
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
        trainer: any `Trainer`; a `MoaTrainer` also knows its expert load and its last budgets' rows.
        language, license, tags: for the metadata. There is no default license.
        model_name: default: that of the Hub repository, or of the folder.
        finetuned_from: default: the name that the model was loaded by. A path on this machine stays out
            of the card; the `base_model` of a card at that path is taken.
        tasks: default: what the model's class is for. Of several, the first.
        dataset_tags, dataset, dataset_args: ids on the Hub, names and configurations of the data sets.
            Default: those that the trainer's data sets were loaded from.
        folder: that the model is saved in, and an adapter's base maybe. Default: the output folder.

    Raises:
        ValueError: the model is not gated; `license` is no identifier.
    """
    args, state = trainer.args, trainer.state
    folder = cast(str, args.output_dir) if folder is None else folder
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    adapter = Adapter.of(model, folder) if getattr(model, "peft_config", None) else None
    name = trainer.hub_model_id or args.hub_model_id
    if not name or model_name not in (None, name.split("/")[-1]):
        name = model_name or Path(folder).absolute().name
    base = finetuned_from or getattr(model.config, "_name_or_path", None)
    if adapter is None:
        base, facts = base_model_of(base), dict[str, Any](model_class=type(model))
    else:  # the very model that the adapter is loaded onto, and not what that one came from
        base, facts = hub_name(adapter.base or base), adapter.facts()
    named = [
        DataUsed(use="", dataset=each if is_hub_id(each) else None, name=words or each, config=config)
        for each, words, config in zip_longest(*map(listed, (dataset_tags, dataset, dataset_args)))
        if each or words
    ]
    used = data_used("training", trainer.train_dataset, named)
    used += data_used("evaluation", trainer.eval_dataset, named)
    # an evaluation may have been given its data when it was called
    evaluated = [each for each in used if each.use == "evaluation"] or named
    task = next(iter(listed(tasks)), None)
    loaded = state.best_global_step if args.load_best_model_at_end else None
    metrics = final_metrics(state.log_history, step=state.global_step, loaded_step=loaded)
    processes = f", {args.world_size} processes" if args.world_size > 1 else ""
    machine = (
        f"{device_name(args.device)}{processes}, {args.per_device_eval_batch_size} examples a batch"
    )
    collator = getattr(trainer.data_collator, "tokenizer", None)
    training = TrainingFacts(
        data=tuple(used),
        hyperparameters=trainer_hyperparameters(trainer),
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
        measured_on=machine,
        expert_load=getattr(trainer, "expert_load", None),
        has_tokenizer=trainer.processing_class is not None or collator is not None,
        **facts,
    )
