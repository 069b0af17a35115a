import pytest
from transformers import AutoTokenizer

from hf_moa.quickstart.tokenizer import pack, train_tokenizer

TEXTS = [
    "Return the name of the widget.",
    "Return a new widget with the given name.",
    "Close the connection; raises OSError if it was closed.",
] * 5


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, vocab_size=120, max_length=12)


def test_text_is_lowered_split_and_framed(tokenizer):
    ids = tokenizer("Return the WIDGET.")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["[CLS]", "return", "the", "widget", ".", "[SEP]"]


def test_unseen_words_fall_into_pieces_that_join_again(tokenizer):
    ids = tokenizer("widgets returned")["input_ids"]
    assert "[UNK]" not in tokenizer.convert_ids_to_tokens(ids)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "widgets returned"


def test_mask_token_in_text_is_the_mask(tokenizer):
    assert tokenizer.mask_token_id in tokenizer("Close the [MASK].")["input_ids"]


def test_special_tokens_come_first_and_are_the_only_ones(tokenizer):
    assert tokenizer.convert_ids_to_tokens(range(5)) == [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
    ]
    assert set(tokenizer.all_special_ids) == set(range(5))
    # Characters are named to the trainer as special tokens; they must not stay so.
    assert "##a" not in tokenizer.tokenize("##a")


def test_same_texts_give_the_same_vocabulary(tokenizer):
    for _ in range(3):
        assert train_tokenizer(TEXTS, vocab_size=120).get_vocab() == tokenizer.get_vocab()


def test_vocabulary_keeps_to_its_size(tokenizer):
    assert len(tokenizer) <= 120
    assert sorted(tokenizer.get_vocab().values()) == list(range(len(tokenizer)))


def test_long_text_is_cut_to_the_models_length(tokenizer):
    assert len(tokenizer(" ".join(TEXTS), truncation=True)["input_ids"]) == 12


def test_reloaded_tokenizer_is_the_same(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    reloaded = AutoTokenizer.from_pretrained(tmp_path)
    assert reloaded.get_vocab() == tokenizer.get_vocab()
    text = "Close the [MASK] of a widget; unseen zebra."
    assert reloaded(text, TEXTS[0])["input_ids"] == tokenizer(text, TEXTS[0])["input_ids"]
    assert reloaded.pad_token_id == tokenizer.pad_token_id
    assert reloaded.model_max_length == 12


def test_no_text_is_an_error():
    with pytest.raises(ValueError, match="at least one word"):
        train_tokenizer(["  ", ""])


def test_packed_sequences_are_full_and_hold_the_text_in_order(tokenizer):
    blocks = pack(tokenizer, TEXTS, length=10)
    assert all(len(block["input_ids"]) == 10 for block in blocks)
    assert all(block["attention_mask"] == [1] * 10 for block in blocks)
    assert all(block["input_ids"][0] == tokenizer.cls_token_id for block in blocks)
    stream = [token for block in blocks for token in block["input_ids"][1:]]
    expected = [
        token
        for text in TEXTS
        for token in [
            *tokenizer(text, add_special_tokens=False)["input_ids"],
            tokenizer.sep_token_id,
        ]
    ]
    assert stream == expected[: len(stream)]
    assert len(expected) - len(stream) < 9
