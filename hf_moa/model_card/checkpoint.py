"""A card from a checkpoint's folder: config.json or adapter_config.json, and what lies beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard
from transformers import AutoConfig

from hf_moa.modeling.core.configuration import GatingConfig

from .adapter import Adapter
from .card import model_card
from .existing import (
    base_on_hub,
    forget_base,
    knows_results,
    merged_card,
    read_card,
    sections_of,
    training_data,
)
from .facts import (
    DataUsed,
    TrainingFacts,
    as_number,
    at_budget,
    eval_results,
    hub_name,
    listed,
    named_data,
    named_metrics,
    read_json,
    read_object,
)
from .tables import budget_table
from .trainer import final_metrics, history_of

_METRIC_FILES = ("all_results.json", "eval_results.json")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "spiece.model")
# What trainer_state.json tells of the training -> what a card calls it.
_HYPERPARAMETERS = {
    "train_batch_size": "train_batch_size",
    "max_steps": "training_steps",
    "num_train_epochs": "num_epochs",
    "global_step": "steps_done",
    "epoch": "epochs_done",
}


def checkpoint_card(
    folder: str | Path,
    *,
    name: str | None = None,
    license: str | None = None,
    base_model: str | None = None,
    datasets: Sequence[str] = (),
    language: str | Sequence[str] | None = None,
    task: str | None = None,
    metrics: str | Path | Mapping[str, float] | None = None,
    budgets: str | Path | Sequence[Mapping[str, Any]] | None = None,
    training: TrainingFacts | None = None,
    old: ModelCard | None = None,
    adapter: Adapter | None = None,
    expert_load: Mapping[str, Sequence[Sequence[float]]] | None = None,
    expert_load_of: str = "",
) -> ModelCard:
    """The card of a saved model or PEFT adapter. Nothing is unpickled, and no weights are read.

    Args:
        folder: with config.json or adapter_config.json. Beside it are read, where they are:
            trainer_state.json, all_results.json or eval_results.json, budget_results*.json (if there is
            one), README.md.
        name: the model's id on the Hub, for the snippets. Default: the folder's name.
        license, language: as of `model_card`. Default: those of the old card.
        base_model: id on the Hub. Default: that of the old card; of an adapter, the base that it names.
        datasets: ids on the Hub. Default: those of the old card. The results in the metadata are on the
            data set, where there is one.
        task: what the model does, in the Hub's words. Default: that of the old card, or of the class.
        metrics: by name, or a JSON file of them, instead of those beside the checkpoint.
        budgets: the rows that `evaluate_budgets` returned, or a JSON file of them.
        training: how these very weights were made: what the old card says of others' results is gone.
            Default: what trainer_state.json tells, or else the old card.
        old: the card to take what is not known from. Default: README.md of the folder. Unless
            `training` is given, its results, budgets and data stay where nothing here says otherwise:
            what wrote it knew more of them.
        adapter: the adapter in the folder. Default: what adapter_config.json says; its base's
            configuration is read from where it is, which may be the Hub.
        expert_load, expert_load_of: as of `model_card`. Default: what the old card says.

    Raises:
        ValueError: there is neither file, or not of a gated model; an adapter's base cannot be read; a
            file does not hold what it should; `license` or `base_model` is no identifier.
    """
    folder = Path(folder)
    old = read_card(folder / "README.md") if old is None else old
    if adapter is None and _has(folder, "adapter_config.json") and not _has(folder, "config.json"):
        adapter = Adapter.in_folder(folder, base_model=base_model)
    if adapter is None:
        config = _config(folder)
        facts = {"carries_code": _has(folder, f"modeling_{config.model_type}.py")}
    else:
        config, facts = adapter.config, adapter.facts()
        if adapter.base_folder is None:
            base_model = base_model or hub_name(adapter.base)
        elif old is not None:
            forget_base(old, adapter.base)
        base_model = base_model or base_on_hub(old)
    given = list(datasets)
    if old is not None:
        datasets, task = given or listed(old.data.datasets), task or old.data.pipeline_tag
    state = read_object(folder / "trainer_state.json") if _has(folder, "trainer_state.json") else {}
    found = _metrics(folder, metrics, config) or _logged_metrics(state)
    results = eval_results(found, task=task, data=_evaluated(datasets, old))
    budget_rows = _budget_rows(folder, budgets)
    if training is None:
        # what made the old card measured the same, and may know more of it: on what, on which machine
        said = sections_of(old)
        if old is not None and metrics is None and not given and knows_results(old, results):
            results = []
        if (
            budgets is None
            and budget_rows
            and budget_table(budget_rows) in said.get("Compute budgets", "")
        ):
            budget_rows = []
        shown = {
            _HYPERPARAMETERS[key]: state[key] for key in _HYPERPARAMETERS if state.get(key) is not None
        }
        training = TrainingFacts(
            # the section of the old card stays where nobody names others
            data=training_data(old, datasets) if given or "Training data" not in said else (),
            # that of its trainer says more than the state does
            hyperparameters={} if "Training hyperparameters" in said else shown,
            history=history_of(state.get("log_history") or []),
        )
        same_weights = True
    else:
        same_weights = False
    card = model_card(
        config,
        name=name or folder.absolute().name,
        license=license,
        base_model=base_model,
        datasets=datasets,
        language=language,
        task=task,
        results=results,
        training=training,
        budget_rows=budget_rows,
        has_tokenizer=any(_has(folder, file) for file in _TOKENIZER_FILES),
        expert_load=expert_load,
        expert_load_of=expert_load_of,
        **facts,
    )
    return merged_card(card, old, same_weights=same_weights)


def _has(folder: Path, name: str) -> bool:
    return (folder / name).is_file()


def _config(folder: Path) -> GatingConfig:
    if not _has(folder, "config.json"):
        raise ValueError(
            f"The checkpoint must be a folder with config.json or adapter_config.json (got {folder}, "
            "which has neither); give the folder that save_pretrained or MoaTrainer wrote."
        )
    model_type = read_object(folder / "config.json").get("model_type")
    if not str(model_type).startswith("moa_"):
        raise ValueError(
            f"The checkpoint's model_type must be moa_bert, moa_gpt2 or moa_t5 (got {model_type!r} in "
            f"{folder / 'config.json'}); `hf-moa upcycle` makes a gated model of a plain one."
        )
    return AutoConfig.from_pretrained(folder)


def _metrics(
    folder: Path, given: str | Path | Mapping[str, float] | None, config: GatingConfig
) -> list[tuple[str, str, float | int]]:
    if given is not None:
        entries = given if isinstance(given, Mapping) else read_object(Path(given))
        wrong = [name for name, value in entries.items() if as_number(value) is None]
        found = named_metrics(entries)
        if wrong or not found:
            raise ValueError(
                f"{_source(given, 'metrics')} must hold metrics by name, each a number, such as "
                f'{{"accuracy": 0.9}} (got {"no number for " + ", ".join(wrong) if wrong else "none"}).'
            )
        return found
    entries = (read_object(folder / name) for name in _METRIC_FILES if _has(folder, name))
    named = (named_metrics(_at_largest_budget(entry, config)) for entry in entries)
    return next(filter(None, named), [])


def _at_largest_budget(entries: Mapping[str, Any], config: GatingConfig) -> dict[str, Any]:
    """What an Accelerate script wrote, of a CCT model at its largest budget under the plain names."""
    found = dict(entries)
    ends = [at_budget("", budget) for budget in config.listed_budgets]
    for name in [key.removesuffix(ends[0]) for key in entries if ends and key.endswith(ends[0])]:
        if all(name + end in entries for end in ends):
            largest, *_ = [found.pop(name + end) for end in ends]
            found |= {} if name == "compute_fraction" else {name: largest}
    return found


def _logged_metrics(state: Mapping[str, Any]) -> list[tuple[str, str, float | int]]:
    """Metrics of the weights that a trainer's state belongs to."""
    log, step, best = (state.get(name) for name in ("log_history", "global_step", "best_global_step"))
    if best not in (None, step) and any("train_runtime" in entry for entry in log or []):
        return []  # the weights may be the best ones or the last; the state does not say which
    return final_metrics(log or [], step=step)


def _budget_rows(
    folder: Path, given: str | Path | Sequence[Mapping[str, Any]] | None
) -> Sequence[Mapping[str, Any]]:
    if given is None:
        files = sorted(folder.glob("budget_results*.json"))
        if len(files) != 1:  # of several data sets
            return []
        given = files[0]
    is_file = isinstance(given, (str, Path))
    rows = read_json(Path(given)) if is_file else list(given)
    is_list = isinstance(rows, list) and all(isinstance(row, dict) for row in rows)
    if not is_list or (is_file and not rows):
        raise ValueError(
            f"{_source(given, 'budgets')} must hold a list of the rows that `evaluate_budgets` returned "
            f"(got {json.dumps(rows)[:60]})."
        )
    return rows


def _source(given: Any, name: str) -> Any:
    """What to call it in an error: a file by its path."""
    return given if isinstance(given, (str, Path)) else f"`{name}`"


def _evaluated(datasets: Sequence[str], old: ModelCard | None) -> DataUsed | None:
    """What the metrics were measured on: the one data set, just as the old card's results name it."""
    if len(datasets) != 1:
        return None
    known = {_data_of(result) for result in listed(old and old.data.eval_results)}
    return known.pop() if [used.dataset for used in known] == [*datasets] else named_data(datasets[0])


def _data_of(result: EvalResult) -> DataUsed:
    return DataUsed(
        use="evaluation",
        name=result.dataset_name,
        dataset=result.dataset_type,
        config=result.dataset_config,
        split=result.dataset_split,
        revision=result.dataset_revision,
    )
