"""`model_card`: a card from plain data."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from hf_moa.gated_models import is_instance_by_name
from hf_moa.markdown import table, union_table
from hf_moa.modeling.core.configuration import GatingConfig
from hf_moa.upcycle_families import family_of

from .expert_load import expert_load_table
from .facts import TrainingFacts, is_finite, is_hub_id
from .loading import class_of, loading_in_words, task_of
from .mechanisms import citations, mechanism_phrases, mechanism_tags, mechanisms_in_words
from .tables import budget_table, data_table, result_table

# What stands under these headings is this package's to write: a new card has the place of an old one's,
# as far as it knows of it. What stands under others stays.
LOADING = "How to load"
MECHANISM = "Mechanism"
DATA = "Training data"
HYPERPARAMETERS = "Training hyperparameters"
HISTORY = "Training results"
RESULTS = "Results"
BUDGETS = "Compute budgets"
EXPERT_LOAD = "Expert load"
CITATION = "Citation"
HEADINGS = (
    LOADING,
    MECHANISM,
    DATA,
    HYPERPARAMETERS,
    HISTORY,
    RESULTS,
    BUDGETS,
    EXPERT_LOAD,
    CITATION,
)

MARK = "<!-- Written by hf_moa"
_COMMENT = f"""{MARK}, from what it knows of this model. Add what only you know: intended uses, limits,
where the data come from. Sections of your own stay when the card is written anew; this introduction too,
once this comment is gone. -->"""

_FTG = ("FTG", "FTG+")
_BACKBONES = {"bert": "BERT", "gpt2": "GPT-2", "t5": "T5"}


def model_card(
    config: GatingConfig,
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
        name: the model's id on the Hub, or the folder it is in, for the snippets; its last part is the
            title.
        model_class: default: the class that the config names in `architectures`.
        license: the Hub's identifier, such as "apache-2.0". There is no default.
        base_model: the Hub's id of the model that this one started from.
        datasets: the data sets' ids on the Hub. Names that can be no ids stay out of the metadata.
        language: such as "en".
        tags: further ones.
        task: what the model does, in the Hub's words. Default: that of its class.
        results: metrics. Those that name a task and a data set, and whose value is finite, also enter
            the metadata.
        training: data and hyperparameters.
        budget_rows: what `evaluate_budgets` returned.
        measured_on: the machine of `budget_rows`, in words.
        expert_load: part of the layer -> `[layers][N]`, each expert's share of the assignments or, of
            an MAE gate, of the weight.
        expert_load_of: what `expert_load` is the mean over, in words.
        adapter: the PEFT method ("FTG", "FTG+", "LORA"), where the card is an adapter's.
        adapter_trains: what that trains, in a sentence.
        base_folder: the folder beside an adapter that its base is in, where it is nowhere else.
        has_tokenizer: whether a tokenizer is saved with the model.
        carries_code: whether the checkpoint loads with `trust_remote_code=True`.

    Returns:
        A `huggingface_hub.ModelCard`: `str(card)` is the text of README.md.

    Raises:
        ValueError: `config` is of no gated model; `license` or `base_model` is no identifier; a row of
            `budget_rows` or a share of `expert_load` is none.
    """
    if not is_instance_by_name(config, GatingConfig):
        raise ValueError(
            f"config must be a gated model's, such as MoaBertConfig (got {type(config).__name__}). "
            "`hf_moa.upcycle` makes a gated model of a plain one."
        )
    check_license(license)
    if base_model is not None and not is_hub_id(base_model):
        raise ValueError(
            f"base_model must be the id of a model on the Hub, such as google-bert/bert-base-uncased "
            f"(got {base_model!r})."
        )
    model_class = class_of(config, model_class)
    task = task or task_of(config, model_class)
    title = name.rstrip("/").split("/")[-1]
    data = _metadata(
        title,
        results,
        base_model=base_model,
        datasets=[name for name in datasets if is_hub_id(name)] or None,
        language=language if language is None or isinstance(language, str) else list(language),
        library_name="transformers" if adapter is None else "peft",
        license=license,
        pipeline_tag=task,
        tags=[
            "hf_moa",
            *mechanism_tags(config),
            *([adapter.lower().rstrip("+")] if adapter else []),
            *tags,
        ],
    )
    base = base_model or "path/or/name/of/the/base/model"
    sections = {
        LOADING: loading_in_words(
            config,
            name=name,
            model_class=model_class,
            has_tokenizer=has_tokenizer,
            carries_code=carries_code,
            base=base if adapter else None,
            base_folder=base_folder,
        ),
        MECHANISM: mechanisms_in_words(config),
        **_training_sections(training or TrainingFacts()),
    }
    if results:
        sections[RESULTS] = result_table(results)
    if budget_rows:
        sections[BUDGETS] = _budgets_in_words(budget_rows, measured_on)
    if expert_load:
        sections[EXPERT_LOAD] = (
            "Each expert's share of what its router assigned, or of the weight its MAE gate gave: the "
            f"mean over {expert_load_of}. The entropy is relative to that of an even load.\n\n"
            f"{expert_load_table(expert_load)}"
        )
    entries = citations(config, is_ftg=adapter in _FTG)
    if entries:
        sections[CITATION] = "```bibtex\n" + "\n\n".join(entries) + "\n```"
    introduction = _introduction(config, model_class, base_model, adapter, adapter_trains)
    text = f"\n{_COMMENT}\n\n# {title}\n\n{introduction}\n"
    text += "".join(f"\n## {heading}\n\n{body}\n" for heading, body in sections.items())
    return card_of(data, text)


def card_of(data: ModelCardData, text: str) -> ModelCard:
    """A card of metadata and text."""
    return ModelCard(f"---\n{data.to_yaml()}\n---\n{text}")


def check_license(license: str | None) -> None:
    """Raise a ValueError unless it is None or can be one of the Hub's identifiers."""
    if license is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", license):
        raise ValueError(
            "license must be an identifier as the Hub has them, in small letters and without spaces, "
            f"such as apache-2.0 or other (got {license!r})."
        )


def _metadata(title: str, results: Sequence[EvalResult], **fields: Any) -> ModelCardData:
    """Metadata with those results that the Hub takes."""
    complete = [
        result
        for result in results
        if all((result.task_type, result.dataset_type, result.dataset_name, result.metric_type))
        and (is_finite(result.metric_value) or isinstance(result.metric_value, str))
    ]
    if complete:
        fields |= {"eval_results": complete, "model_name": title}
    # a loss is no metric of the Hub's
    types = dict.fromkeys(result.metric_type for result in results)
    metrics = [metric for metric in types if metric != "loss"]
    return ModelCardData(metrics=metrics or None, **fields)


def _introduction(
    config: GatingConfig,
    model_class: str,
    base_model: str | None,
    adapter: str | None,
    adapter_trains: str | None,
) -> str:
    backbone = _BACKBONES[family_of(config).model_type]
    phrases = mechanism_phrases(config)
    joined = ", and ".join([", ".join(phrases[:-1]), phrases[-1]] if len(phrases) > 1 else phrases)
    what = f"a {backbone} {joined}" if joined else f"a {backbone}"
    if adapter is not None:
        of = f"`{base_model}`, " if base_model else ""
        text = f"A PEFT adapter ({adapter}) of {of}{what} (`{model_class}`)."
        return f"{text} {adapter_trains}" if adapter_trains else text
    origin = f" It started from `{base_model}`." if base_model else ""
    return f"{what[0].upper()}{what[1:]} (`{model_class}`).{origin}"


def _training_sections(training: TrainingFacts) -> dict[str, str]:
    sections = {}
    if training.data:
        sections[DATA] = data_table(training.data)
    if training.hyperparameters:
        rows = [[f"`{key}`", value] for key, value in training.hyperparameters.items()]
        sections[HYPERPARAMETERS] = table(["hyperparameter", "value"], rows)
        if training.versions:
            # the heading and the lines that PEFT looks for before it adds its own
            lines = [f"- {package} {version}" for package, version in training.versions.items()]
            sections[HYPERPARAMETERS] += "\n\n### Framework versions\n\n" + "\n".join(lines)
    if training.history:
        sections[HISTORY] = union_table(training.history)
    return sections


def _budgets_in_words(rows: Sequence[Mapping[str, Any]], measured_on: str | None) -> str:
    text = "Compute fraction: share of the gated computation that was carried out."
    if any("seconds" in row for row in rows):
        on = f" on {measured_on}" if measured_on else ""
        text = (
            f"Measured with `hf_moa.training.evaluate_budgets`{on}. {text} Seconds: one pass over the "
            "evaluation data, loading included. Speed-up: over the largest budget."
        )
    return f"{text}\n\n{budget_table(rows)}"
