"""The order of the sequences, where those of similar length come together."""

import torch
from accelerate import skip_first_batches
from accelerate.data_loader import prepare_data_loader
from accelerate_state import fresh_accelerator  # noqa: F401 - fixture
from torch.utils.data import DataLoader

from hf_moa.recipes.accelerate.sampling import EpochsGroupedByLength


def mean_padding(order, lengths, size):
    batches = [[lengths[i] for i in order[start : start + size]] for start in range(0, len(order), size)]
    return sum(max(batch) * len(batch) - sum(batch) for batch in batches) / len(order)


def test_sequences_grouped_by_length_are_in_an_order_of_seed_and_epoch():
    lengths = torch.randint(1, 50, (400,), generator=torch.Generator().manual_seed(0)).tolist()
    sampler = EpochsGroupedByLength(lengths, 16, seed=1)
    first = list(sampler)
    torch.rand(3)
    assert list(sampler) == first
    sampler.set_epoch(1)
    second = list(sampler)
    assert second != first
    assert sorted(first) == sorted(second) == list(range(400))
    assert list(EpochsGroupedByLength(lengths, 16, seed=2)) == second  # as Accelerate's random order
    assert mean_padding(first, lengths, 8) < 0.3 * mean_padding(range(400), lengths, 8)


def test_processes_share_the_order_of_sequences_grouped_by_length(fresh_accelerator):  # noqa: F811
    """And one that is resumed in the middle of an epoch."""
    examples = list(range(40))

    def batches(process_index=0, num_processes=1, skipped=0):
        sampler = EpochsGroupedByLength([example % 7 for example in examples], 8, seed=0)
        loader = DataLoader(examples, batch_size=8 // num_processes, sampler=sampler)
        loader = prepare_data_loader(loader, None, num_processes, process_index)
        loader.set_epoch(3)
        loader = skip_first_batches(loader, skipped) if skipped else loader
        return [batch.tolist() for batch in loader]

    parts = zip(batches(0, 2), batches(1, 2), strict=True)
    assert [first + second for first, second in parts] == batches()
    assert batches(skipped=2) == batches()[2:]
    assert batches(1, 2, skipped=2) == batches(1, 2)[2:]
