"""What an old card's tables say, and whether it still holds when a new card is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from huggingface_hub import EvalResult, ModelCard

from hf_moa.markdown import cell, read_table

from .card import DATA, RESULTS, card_of
from .existing import ADAPTER_TAG, split_sections
from .facts import DataUsed, is_hub_id
from .tables import data_rows


def knows_results(old: ModelCard, results: Sequence[EvalResult]) -> bool:
    """Whether a card tells these very results: under their names in its table, and in its metadata, as
    far as they stand there, with all their digits."""
    said = dict(split_sections(old.text)[1]).get(RESULTS, "")
    shown = {(row.get("metric"), row.get("value")) for row in read_table(said)}
    exact: dict[str | None, set] = {}
    for result in old.data.eval_results or []:
        exact.setdefault(result.metric_name, set()).add(result.metric_value)
    return all(
        (result.metric_name, cell(result.metric_value)) in shown
        and result.metric_value in exact.get(result.metric_name, {result.metric_value})
        for result in results
    )


def training_data(old: ModelCard | None, given: Sequence[str]) -> tuple[DataUsed, ...]:
    """The data sets of a new card whose caller names those of the training.

    Args:
        old: the card with the rows that are known: of a data set that is not named any more they go; one
            without a data set is that of the one named.
        given: ids on the Hub, or names.
    """
    known = [] if old is None else data_rows(dict(split_sections(old.text)[1]).get(DATA, ""))
    gone = {row.dataset for row in known if row.use == "training" and row.dataset} - {*given}
    rows = []
    for row in known:
        if row.dataset in gone:
            continue
        if row.use == "training" and row.dataset is None and len(given) == 1:
            row = replace(row, dataset=given[0])
        rows.append(row)
    named = {row.dataset for row in rows if row.use == "training"}
    rows += [named_data(name) for name in given if name not in named]
    return tuple(sorted(rows, key=lambda row: row.use != "training"))


def named_data(name: str) -> DataUsed:
    return DataUsed(use="training", dataset=name if is_hub_id(name) else None, name=name)


def without_base(card: ModelCard | None, path: str) -> ModelCard | None:
    """An adapter's card whose metadata do not take a path, that of the base, for an id on the Hub."""
    if card is None:
        return None
    data = card.data
    if data.base_model == path:
        data.base_model = None
    data.tags = [tag for tag in data.tags or [] if tag != f"{ADAPTER_TAG}{path}"]
    return card_of(data, card.text)
