"""Text as tokens, and these in blocks."""

import os

import pytest
import torch

from hf_moa.recipes.text_blocks import TextBlocks, encode
from hf_moa.recipes.tokenizers import train_text_tokenizer


def test_no_lines_are_no_tokens():
    ids, lengths = encode([], None)
    assert (ids.tolist(), lengths.tolist()) == ([], [])


@pytest.mark.parametrize("workers", [None, 2])
def test_workers_share_the_lines(workers):
    def tokenizer(lines, **options):
        return {"input_ids": [[os.getpid()] * int(line) for line in lines]}

    numbers = [i % 3 for i in range(2000)]
    ids, lengths = encode([f"{number}\n" for number in numbers], tokenizer, workers)
    assert lengths.tolist() == numbers
    assert len(ids) == sum(numbers)
    processes = set(ids.tolist())
    assert processes == {os.getpid()} if workers is None else len(processes - {os.getpid()}) == 2


def test_blocks_predict_every_token_but_the_first_once():
    tokenizer = train_text_tokenizer(["ab"], 300)
    for num_tokens, block_size in ((3, 8), (8, 8), (9, 8), (40, 7)):
        blocks = TextBlocks(["\x01" * (num_tokens - 1)], tokenizer, block_size)
        blocks.ids = torch.arange(num_tokens)
        predicted = []
        for i in range(len(blocks)):
            block = blocks[i]
            assert len(block["input_ids"]) == min(block_size, num_tokens)
            predicted += block["labels"][1:][block["labels"][1:] != -100].tolist()
            assert block["labels"][0] == -100
        assert predicted == list(range(1, num_tokens))
