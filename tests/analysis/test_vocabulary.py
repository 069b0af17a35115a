"""What the tables of an analysis call the tokens."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from hf_moa.analysis import Vocabulary

TEXT = "die Mütze liegt auf der Straße , 10 € \n"


def byte_level_tokenizer():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=alphabet, special_tokens=["<é>"], show_progress=False
    )
    tokenizer.train_from_iterator([TEXT] * 9, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<é>")


def test_bytes_are_named_by_their_text():
    tokenizer = byte_level_tokenizer()
    vocabulary = Vocabulary(tokenizer)
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    named = {vocabulary.name(i): vocabulary.kind(i) for i in ids}
    assert {"ĠMütze", "ĠStraße", "Ġliegt", "ĠĊ"} <= named.keys()
    assert named["ĠMütze"] == named["Ġliegt"] == "word"
    assert named["Ġ10"] == "number"
    assert "ĠMÃ¼tze" in tokenizer.convert_ids_to_tokens(ids)
    # parts of a character stay as the vocabulary has them, and so do special tokens
    [part, *_] = [i for i in range(len(tokenizer)) if tokenizer.convert_ids_to_tokens(i) == "Ã"]
    assert vocabulary.name(part) == "Ã"
    assert vocabulary.name(tokenizer.pad_token_id) == "<é>"
    assert vocabulary.kind(tokenizer.pad_token_id) == "special"
