"""`model_card`: a card from plain data. Its text is in card.md.jinja."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from hf_moa.expert_load import expert_load_table
from hf_moa.families import family_of
from hf_moa.gated_models import auto_class_names, is_instance_by_name
from hf_moa.hub_names import is_hub_id
from hf_moa.markdown import cell, union_table
from hf_moa.modeling.config.gating import GatingConfig
from hf_moa.run_facts import TrainingFacts
from hf_moa.run_results import budget_table

from .data_and_results import data_table, result_table
from .mechanisms import citations, mechanism_phrases, mechanism_tags, mechanisms_in_words

if TYPE_CHECKING:
    from hf_moa.gated_models import GatedPreTrainedConfig

_TEMPLATE = Path(__file__).with_name("card.md.jinja").read_text(encoding="utf-8")
# A new card replaces what stands under these, as far as it knows of it. What is under others stays.
HEADINGS = tuple(re.findall(r"^## (.+)$", _TEMPLATE, flags=re.MULTILINE))


def model_card(
    config: GatedPreTrainedConfig,
    *,
    name: str,
    model_class: type | str | None = None,
    license: str | None = None,
    base_model: str | None = None,
    datasets: Sequence[str] = (),
    language: str | Sequence[str] | None = None,
    tags: Sequence[str] = (),
    task: str | None = None,
    results: Sequence[EvalResult] = (),
    training: TrainingFacts | None = None,
    budget_rows: Sequence[Mapping[str, Any]] = (),
    measured_on: str | None = None,
    expert_load: Mapping[str, Sequence[Sequence[float]]] | None = None,
    expert_load_of: str = "the training batches of the last log",
    adapter: str | None = None,
    adapter_trains: str | None = None,
    base_folder: str | None = None,
    has_tokenizer: bool = True,
    carries_code: bool = True,
) -> ModelCard:
    """The card of a gated model.

    Args:
        config: the model's configuration.
        name: the model's id on the Hub, or its folder, for the snippets; its last part is the title.
        model_class: default: the class that the config names in `architectures`.
        license: the Hub's identifier, such as "apache-2.0". There is no default.
        language, tags: for the metadata: such as "en"; further tags.
        base_model: the Hub's id of the model that this one started from.
        datasets: ids on the Hub. Names that can be no ids stay out of the metadata.
        task: what the model does, in the Hub's words. Default: that of its class.
        results: metrics. Those that name a data set, and whose value is finite, also enter the metadata.
        training: data and hyperparameters.
        budget_rows, measured_on: what `evaluate_budgets` returned, and on which machine.
        expert_load: part of the layer -> `[layers][N]`, each expert's share of the assignments or, of
            an MAE gate, of the weight.
        expert_load_of: what `expert_load` is the mean over, in words.
        adapter, adapter_trains: the PEFT method ("FTG", "FTG+", "LORA") where the card is an adapter's,
            and what that trains, in a sentence.
        base_folder: the folder beside an adapter that its base is in, where it is nowhere else.
        has_tokenizer: whether a tokenizer is saved with the model.
        carries_code: whether the checkpoint loads with `trust_remote_code=True`.

    Raises:
        ValueError: `config` is of no gated model; `license` or `base_model` is no identifier; a row of
            `budget_rows` or a share of `expert_load` is none.
    """
    if not is_instance_by_name(config, GatingConfig):
        raise ValueError(
            f"config must be a gated model's, such as MoaBertConfig (got {type(config).__name__}). "
            "`hf_moa.upcycle` makes a gated model of a plain one."
        )
    if license is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", license):
        raise ValueError(
            "license must be an identifier as the Hub has them, in small letters and without spaces, "
            f"such as apache-2.0 or other (got {license!r})."
        )
    if base_model is not None and not is_hub_id(base_model):
        raise ValueError(
            "base_model must be the id of a model on the Hub, such as google-bert/bert-base-uncased "
            f"(got {base_model!r})."
        )
    model_class, auto_class, class_task = _class_of(config, model_class)
    title = name.rstrip("/").split("/")[-1]
    results = [replace(each, task_type=each.task_type or task or class_task) for each in results]
    complete = [result for result in results if _is_taken(result)]
    # a loss is no metric of the Hub's
    metrics = dict.fromkeys(result.metric_type for result in results if result.metric_type != "loss")
    method = [adapter.lower().rstrip("+")] if adapter else []
    data = ModelCardData(
        base_model=base_model,
        datasets=[name for name in datasets if is_hub_id(name)] or None,
        eval_results=complete or None,
        language=language if language is None or isinstance(language, str) else list(language),
        library_name="peft" if adapter else "transformers",
        license=license,
        metrics=list(metrics) or None,
        model_name=title if complete else None,
        pipeline_tag=task or class_task,
        tags=["hf_moa", *mechanism_tags(config), *method, *tags],
    )
    training = training or TrainingFacts()
    backbone = family_of(config).title
    *phrases, last = mechanism_phrases(config) or [""]
    is_classifier = auto_class.endswith(("SequenceClassification", "TokenClassification"))
    return ModelCard.from_template(
        data,
        template_str=_TEMPLATE,
        title=title,
        name=name,
        what=f"{backbone} {', '.join(phrases)}{', and ' if phrases else ''}{last}".rstrip(),
        model_class=model_class,
        auto_class=auto_class,
        task=class_task,
        adapter=adapter,
        adapter_trains=adapter_trains,
        base=base_model or "path/or/name/of/the/base/model",
        base_folder=base_folder,
        # the base need not have the head that is saved with an adapter
        num_labels=config.num_labels if adapter and is_classifier else None,
        has_tokenizer=has_tokenizer,
        carries_code=carries_code,
        end_id=config.eos_token_id if isinstance(config.eos_token_id, int) else 4,
        budgets=_budgets_of(config, model_class),
        mechanism=mechanisms_in_words(config),
        training=training,
        data=training.data and data_table(training.data),
        history=training.history and union_table(training.history),
        results=results and result_table(results),
        budget_table=budget_rows and budget_table(budget_rows),
        is_timed=any("seconds" in row for row in budget_rows),
        measured_on=measured_on,
        expert_load=expert_load and expert_load_table(expert_load),
        expert_load_of=expert_load_of,
        cell=cell,
        citations=citations(config, is_ftg=adapter in ("FTG", "FTG+")),
    )


def _class_of(config: GatedPreTrainedConfig, model_class: type | str | None) -> tuple[str, str, str]:
    """The family's class that a model is (of a class derived from it, its parent; without any, the base
    model), the auto class that loads it, and its task on the Hub: of `MoaBertForMaskedLM`, fill-mask."""
    auto_classes = auto_class_names(config)
    names = [model_class] if model_class else config.architectures or []
    if isinstance(model_class, type):
        names = [parent.__name__ for parent in model_class.__mro__]
    found = next((name for name in names if name in auto_classes), next(iter(auto_classes)))
    tasks = {f"Moa{name}": task for task, name in family_of(config).tasks.items()}
    task = tasks.get(found, "feature-extraction")
    return found, auto_classes[found], "feature-extraction" if task == "text-encoding" else task


def _budgets_of(config: GatingConfig, model_class: str) -> list[Any]:
    """The budgets that a call may name, largest first: pairs where each half has its own."""
    budgets = config.listed_budgets
    if model_class not in ("MoaT5EncoderModel", "MoaT5ForTokenClassification"):
        return budgets
    return sorted({each[0] if isinstance(each, tuple) else each for each in budgets}, reverse=True)


def _is_taken(result: EvalResult) -> bool:
    """Whether the Hub takes a result in a card's metadata."""
    value = result.metric_value
    is_value = isinstance(value, str) or (isinstance(value, (int, float)) and math.isfinite(value))
    return is_value and all((result.dataset_type, result.dataset_name, result.metric_type))
