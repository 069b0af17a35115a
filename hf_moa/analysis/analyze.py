"""One pass over data, and every measure that the model's mechanisms have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers.utils import logging

from hf_moa.eval_mode import in_eval_mode
from hf_moa.gated_models import gated_model_of, is_instance_by_name
from hf_moa.modeling.core.budgets import BudgetHolder
from hf_moa.modeling.core.mechanism import MECHANISMS, mechanisms_of

from .budget_names import budget_name
from .measure import measures_of
from .observe import observe
from .untrained import untrained_mechanisms
from .vocabulary import Vocabulary

logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class Analysis:
    """What the gates of a model did on some data.

    Attributes:
        tables: by name; which ones depends on the model's mechanisms (see the measures' `tables`).
        facts: the model and the data in a few words, for a report's head.
    """

    tables: dict[str, pd.DataFrame]
    facts: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON; None where a table has no number."""
        tables = {
            name: table.astype(object).where(table.notna(), None).to_dict(orient="records")
            for name, table in self.tables.items()
        }
        return {"facts": self.facts, "tables": tables}


def analyze(
    model: nn.Module,
    batches: Iterable[Mapping[str, Tensor]],
    *,
    tokenizer: Any = None,
    budgets: Sequence[Any] | None = None,
    kind_of: Callable[[str], str] | None = None,
    least_count: int = 10,
    top_tokens: int = 10,
    total: int | None = None,
    progress: bool = True,
) -> Analysis:
    """Measure what a model's gates do, in one pass over data of any length.

    Args:
        model: any of hf_moa's, bare or wrapped; in whatever mode, which it is in again afterwards.
        batches: arguments of the model: `input_ids`, `attention_mask`, ...; for encoder-decoder models
            also `labels` or `decoder_input_ids`. Nothing of them is kept but counts.
        tokenizer: names the tokens; None leaves ids, and special tokens among the others.
        budgets: to measure compute at; default: each that the model knows, largest first. What
            is not CCT's is measured at the first.
        kind_of: token -> its kind, such as a part of speech; default: word, word piece, number,
            punctuation.
        least_count: occurrences of the tokens that tables of single tokens name.
        top_tokens: how many they name.
        total: number of batches, for the progress bar, where `batches` has no length.
        progress: show the bar.

    Returns:
        The measures, as `tables` of its mechanisms. Of gates that were never trained, which give all
        inputs the same, `facts` and a warning tell.

    Raises:
        ValueError: the model has no gates; a budget that it does not know; no real token in `batches`;
            a batch that lacks what the model reads.
    """
    gated = gated_model_of(model)
    config = gated.config
    if budgets is None:
        budgets = config.listed_budgets
    elif not config.listed_budgets:
        raise ValueError(f"budgets need a model that has some (got {list(budgets)}); leave them out.")
    elif not budgets:
        raise ValueError(f"budgets must name at least one of {config.listed_budgets} (got none).")
    for control in (module for module in gated.modules() if is_instance_by_name(module, BudgetHolder)):
        for budget in budgets:
            control.share(budget)  # refuses one that it does not know, before the first call
    vocabulary = Vocabulary(tokenizer, kind_of)
    sizes = {"least_count": least_count, "top_tokens": top_tokens}
    measures = [measure(gated, vocabulary, **sizes) for measure in measures_of(mechanisms_of(config))]
    if not measures:
        names = ", ".join(m.name for m in MECHANISMS.values() if m.part("analysis"))
        raise ValueError(
            f"model must have gates to analyse, of {names} (got attention_type="
            f"{config.attention_type!r}, ffn_type={config.ffn_type!r} and no others)."
        )
    device = next(model.parameters()).device
    sequences = tokens = 0
    with in_eval_mode(model):
        for batch in tqdm(batches, total=total, desc="analyze", disable=not progress):
            batch = {name: value.to(device) for name, value in batch.items()}
            for index, budget in enumerate(budgets or [None]):
                seen = observe(model, batch, budget=budget)
                if index == 0:
                    sequences += len(next(iter(seen.tokens.values())).ids)
                    tokens += sum(int(side.mask.sum()) for side in seen.tokens.values())
                for measure in measures:
                    if index == 0 or measure.at_every_budget:
                        measure.update(seen)
    tables = {name: table for measure in measures for name, table in measure.tables().items()}
    facts = {
        "model": type(gated).__name__,
        "attention": config.attention_type,
        "feed-forward": config.ffn_type,
        "parameters": gated.num_parameters(),
        "sequences": sequences,
        "tokens": tokens,
    }
    if budgets and not all(measure.at_every_budget for measure in measures):
        facts["budget of the experts' tables"] = budget_name(budgets[0])
    if untrained := untrained_mechanisms(gated):
        facts["never trained"] = f"{', '.join(untrained)}: gates give all inputs the same"
        logger.warning(
            f"The gates of this {type(gated).__name__} were never trained ({', '.join(untrained)}): "
            "they give all inputs the same, and tables of experts and tokens say nothing. Finetune it."
        )
    for measure in measures:
        facts |= measure.facts(tables)
    return Analysis(tables, facts)
