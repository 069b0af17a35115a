"""A BERT-style WordPiece tokenizer trained on the quickstart's own text."""

from collections.abc import Iterable, Iterator

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def train_tokenizer(
    texts: Iterable[str], vocab_size: int = 8192, max_length: int = 128
) -> PreTrainedTokenizerFast:
    """Trains an uncased WordPiece vocabulary and wraps it for transformers.

    Args:
        texts: training text; the same texts give the same vocabulary.
        vocab_size: most entries wanted, the five special tokens included. Smaller texts yield
            fewer.
        max_length: tokens that `truncation=True` leaves, `[CLS]` and `[SEP]` included.

    Returns:
        A fast tokenizer with BERT's normalisation and `[CLS] a [SEP] b [SEP]` template, which
        `save_pretrained` writes and `AutoTokenizer.from_pretrained` reads back.

    Raises:
        ValueError: `texts` is empty.
    """
    texts = list(texts)
    normalizer = normalizers.BertNormalizer(lowercase=True)
    characters = sorted({c for text in texts for c in normalizer.normalize_str(text)} - {" "})
    if not characters:
        raise ValueError("texts must hold at least one word to train a tokenizer on (got none)")

    trainee = _word_piece(normalizer)
    # The trainer numbers the continuation characters in the order of a randomly seeded hash map
    # and breaks ties of frequency by number. Named beforehand, they keep their place, and the same
    # texts give the same vocabulary.
    reserved = [*SPECIAL_TOKENS, *(f"##{character}" for character in characters)]
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size, special_tokens=reserved, show_progress=False
    )
    trainee.train_from_iterator(texts, trainer)
    # Another tokenizer, to which those characters are no longer special.
    tokenizer = _word_piece(normalizer, trainee.get_vocab())
    cls_id, sep_id = tokenizer.token_to_id("[CLS]"), tokenizer.token_to_id("[SEP]")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", cls_id), ("[SEP]", sep_id)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=max_length,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )


def _word_piece(normalizer: normalizers.Normalizer, vocab: dict[str, int] | None = None) -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    return tokenizer


def pack(
    tokenizer: PreTrainedTokenizerFast, texts: Iterable[str], length: int = 128
) -> list[dict[str, list[int]]]:
    """Tokenizes `texts` and packs them, separated by `[SEP]`, into full sequences.

    Returns:
        One `{"input_ids": [length], "attention_mask": [length]}` per sequence. Each starts with
        `[CLS]`; a remainder shorter than `length` is dropped, so nothing is padding.
    """
    ids = list(_stream(tokenizer, texts))
    body = length - 1
    return [
        {
            "input_ids": [tokenizer.cls_token_id, *ids[start : start + body]],
            "attention_mask": [1] * length,
        }
        for start in range(0, len(ids) - body + 1, body)
    ]


def _stream(tokenizer: PreTrainedTokenizerFast, texts: Iterable[str]) -> Iterator[int]:
    # The backend tokenizer is called directly: the wrapper would warn of each long text.
    for encoding in tokenizer.backend_tokenizer.encode_batch(list(texts), add_special_tokens=False):
        yield from encoding.ids
        yield tokenizer.sep_token_id
