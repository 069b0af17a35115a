"""What texts are padded with: the same token for tokenizer and model."""

import pytest
from transformers import PreTrainedTokenizerFast

from hf_moa import MoaGPT2Config, MoaGPT2ForSequenceClassification
from hf_moa.recipes.tokenizers import set_padding, train_byte_level_bpe

ENTRIES = ["<end>", "<pad>", "<other>"]


def tokenizer(**tokens):
    bpe = train_byte_level_bpe(["a text"], 300, ENTRIES, add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, **tokens)


def model(pad_token_id):
    config = MoaGPT2Config(
        vocab_size=300,
        n_embd=8,
        n_layer=1,
        n_head=2,
        n_positions=8,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=pad_token_id,
    )
    return MoaGPT2ForSequenceClassification(config)


@pytest.mark.parametrize(
    ("tokens", "pad_token_id", "expected"),
    [
        ({"pad_token": "<pad>", "eos_token": "<end>"}, None, "<pad>"),
        ({"pad_token": "<pad>", "eos_token": "<end>"}, 1, "<pad>"),
        ({"pad_token": "<other>", "eos_token": "<end>"}, 1, "<other>"),
        ({"eos_token": "<end>"}, None, "<end>"),
        ({"eos_token": "<end>"}, 1, "<pad>"),
        ({}, 2, "<other>"),
    ],
)
def test_tokenizer_and_model_pad_with_one_token(tokens, pad_token_id, expected):
    padding, padded = tokenizer(**tokens), model(pad_token_id)
    set_padding(padding, padded)
    assert padding.pad_token == expected
    assert padded.config.pad_token_id == padding.pad_token_id == ENTRIES.index(expected)


def test_without_any_token_to_pad_with_is_an_error():
    with pytest.raises(ValueError, match="must have a pad_token or an eos_token"):
        set_padding(tokenizer(), model(None))
