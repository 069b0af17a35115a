"""A teacher's logits for a whole data set, computed once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset
from transformers.trainer_utils import has_length
from transformers.utils import logging

logger = logging.get_logger(__name__)

ROW = "teacher_row"  # a column with each example's number in the data set


class _NumberedRows(Dataset):
    """Rows with their number in a further column."""

    def __init__(self, rows: Any):
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {**self.rows[i], ROW: i}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[i] for i in range(len(self)))


def numbered(dataset: Any) -> Any:
    """A data set with the column `ROW`, by which its examples are known in whatever order they come.

    Raises:
        ValueError: it has no length, or no rows by number.
    """
    if not has_length(dataset) or not hasattr(dataset, "__getitem__"):
        raise ValueError(
            "distillation_cache needs a train_dataset with a length and rows by number (got a "
            f"{type(dataset).__name__}): of a stream, no example comes back. Set it to False."
        )
    if hasattr(dataset, "add_column"):  # of `datasets`, whose columns `Trainer` looks at
        return dataset.add_column(ROW, np.arange(len(dataset)))
    return _NumberedRows(dataset)


def cached_logits(
    dataset: Any,
    logits_of: Callable[[dict[str, Any]], Tensor],
    *,
    collator: Callable[[list], dict[str, Any]],
    batch_size: int,
    process: tuple[int, int] = (0, 1),
    sum_over_processes: Callable[[Tensor], Tensor],
) -> Tensor:
    """`[N, classes]` in float32: the logits of each example, in the order of the data set.

    Examples go through the teacher in that order, whatever the seed: a run that resumes has the same.

    Args:
        dataset: N examples, as `numbered` gives them.
        logits_of: of a batch, `[B, classes]`.
        collator: makes a batch, with the column `ROW`.
        batch_size: examples in a batch.
        process: this process's number and how many there are, which share the work.
        sum_over_processes: of a tensor.

    Raises:
        ValueError: the logits are of more than two dimensions.
    """
    number, count = process
    part = Subset(dataset, range(number, len(dataset), count))
    table: Tensor | None = None
    for batch in DataLoader(part, batch_size=batch_size, collate_fn=collator):
        rows = batch.pop(ROW)
        logits = logits_of(batch).float()
        if logits.ndim != 2:
            raise ValueError(
                "distillation_cache is for outputs of a few numbers for an example, `[B, classes]` (got "
                f"logits of shape {tuple(logits.shape)}): of tokens they are millions, and masks or "
                "cuts may be drawn again in each epoch. Set it to False."
            )
        if table is None:
            table = torch.zeros(len(dataset), logits.shape[1], device=logits.device)
            size = table.numel() * table.element_size() / 2**20
            logger.info(
                f"The teacher's logits are computed once, for {len(dataset):,} examples of "
                f"{logits.shape[1]} numbers: {size:.1f} MiB on {table.device}."
            )
        table[rows.to(table.device)] = logits
    if table is None:
        raise ValueError("distillation_cache needs at least one training example for each process.")
    return sum_over_processes(table)
