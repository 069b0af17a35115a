"""A card from a checkpoint's folder: config.json or adapter_config.json, and what lies beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import EvalResult, ModelCard
from transformers import AutoConfig

from hf_moa.adapter_files import Adapter
from hf_moa.hub_names import hub_name
from hf_moa.json_files import read_object
from hf_moa.run_facts import DataUsed, TrainingFacts, state_hyperparameters
from hf_moa.run_results import budget_rows_in, budget_table, history_of, logged_metrics, metrics_in

from .card import model_card
from .data_and_results import eval_results, listed, named_data
from .existing import (
    base_on_hub,
    forget_base,
    merged_card,
    metadata_of,
    read_card,
    sections_of,
    training_data,
)

if TYPE_CHECKING:
    from hf_moa.gated_models import GatedPreTrainedConfig

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "spiece.model")


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
        license, base_model, datasets, language, task, expert_load, expert_load_of: as of `model_card`.
            Default: what the old card says; of an adapter, the base that it names. The results in the
            metadata are on the data set, where there is one.
        metrics: by name, or a JSON file of them, instead of those beside the checkpoint.
        budgets: the rows that `evaluate_budgets` returned, or a JSON file of them.
        training: how these very weights were made: what the old card says of others' results is gone.
            Default: what trainer_state.json tells, or else the old card.
        old: the card to take what is not known from. Default: README.md of the folder. Unless
            `training` is given, its results, budgets and data stay where nothing here says otherwise:
            what wrote it knew more of them.
        adapter: the adapter in the folder. Default: what adapter_config.json says; its base's
            configuration is read from where it is, which may be the Hub.

    Raises:
        ValueError: there is neither file, or not of a gated model; an adapter's base cannot be read; a
            file does not hold what it should; `license` or `base_model` is no identifier.
    """
    folder = Path(folder)
    old = read_card(folder / "README.md") if old is None else old
    files = {path.name for path in folder.glob("*")}
    if adapter is None and "adapter_config.json" in files and "config.json" not in files:
        adapter = Adapter.in_folder(folder, base_model=base_model)
    if adapter is None:
        config = _config(folder)
        facts: dict[str, Any] = {"carries_code": f"modeling_{config.model_type}.py" in files}
    else:
        config, facts = adapter.config, adapter.facts()
        if adapter.base_folder is None:
            base_model = base_model or hub_name(adapter.base)
        elif old is not None and adapter.base is not None:
            forget_base(old, adapter.base)
        base_model = base_model or base_on_hub(old)
    given, same_weights = list(datasets), training is None
    if old is not None:
        said_before = metadata_of(old)
        datasets, task = given or listed(said_before.datasets), task or said_before.pipeline_tag
    state = read_object(folder / "trainer_state.json") if "trainer_state.json" in files else {}
    found = metrics_in(folder, metrics, config) or logged_metrics(state)
    results = eval_results(found, task=task, data=_evaluated(datasets, old))
    budget_rows = budget_rows_in(folder, budgets)
    if training is None:
        said = sections_of(old)
        known = [(each.metric_name, each.metric_value) for each in _results_of(old)]
        if not given and all((each.metric_name, each.metric_value) in known for each in results):
            results = []  # the old card may say more: on what they were measured
        if budgets is None and budget_rows:  # the old card may say on which machine
            is_said = budget_table(budget_rows) in said.get("Compute budgets", "")
            budget_rows = [] if is_said else budget_rows
        training = TrainingFacts(
            # the section of the old card stays where nobody names others
            data=training_data(old, datasets) if given or "Training data" not in said else (),
            # that of its trainer says more than the state does
            hyperparameters={} if "Training hyperparameters" in said else state_hyperparameters(state),
            history=history_of(state.get("log_history") or []),
        )
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
        has_tokenizer=not files.isdisjoint(_TOKENIZER_FILES),
        expert_load=expert_load,
        expert_load_of=expert_load_of,
        **facts,
    )
    return merged_card(card, old, same_weights=same_weights)


def _config(folder: Path) -> GatedPreTrainedConfig:
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"The checkpoint must be a folder with config.json or adapter_config.json (got {folder}, "
            "which has neither); give the folder that save_pretrained or MoaTrainer wrote."
        )
    model_type = read_object(folder / "config.json").get("model_type")
    if not str(model_type).startswith("moa_"):
        raise ValueError(
            f"The checkpoint's model_type must be a gated one, such as moa_bert (got {model_type!r} in "
            f"{folder / 'config.json'}); `hf-moa upcycle` makes a gated model of a plain one."
        )
    return AutoConfig.from_pretrained(folder)


def _results_of(card: ModelCard | None) -> list[EvalResult]:
    return [] if card is None else listed(metadata_of(card).eval_results)


def _evaluated(datasets: Sequence[str], old: ModelCard | None) -> DataUsed | None:
    """What the metrics were measured on: the one data set, just as the old card's results name it."""
    if len(datasets) != 1:
        return None
    fields = ("name", "config", "split", "revision")
    known = {
        tuple(getattr(result, f"dataset_{field}") for field in fields)
        for result in _results_of(old)
        if result.dataset_type == datasets[0] and result.dataset_split != "test"
    }
    if len(known) != 1:
        return named_data(datasets[0])
    facts = dict(zip(fields, known.pop(), strict=True))
    return DataUsed(use="evaluation", dataset=datasets[0], **facts)
