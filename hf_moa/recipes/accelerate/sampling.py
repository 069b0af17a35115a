"""The order of the sequences in the epochs of the loop."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from transformers.trainer_pt_utils import LengthGroupedSampler


class EpochsGroupedByLength(LengthGroupedSampler):
    """transformers' order that puts sequences of similar length together, another in every epoch.

    It follows only from the seed and the epoch, so that all processes and a resumed run have the same;
    Accelerate says which epoch it is.

    Args:
        lengths: tokens of each sequence.
        per_update: sequences of all micro-batches and processes together; groups are multiples of it.
    """

    def __init__(self, lengths: list[int], per_update: int, seed: int):
        super().__init__(per_update, lengths=lengths, generator=torch.Generator())
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.generator.manual_seed(self.seed + self.epoch)
        return super().__iter__()
