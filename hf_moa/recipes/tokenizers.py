"""Tokenizers that are trained on the training text, and what models take from a tokenizer."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

END_OF_TEXT = "<|endoftext|>"
PAD, END, UNKNOWN = "<pad>", "</s>", "<unk>"


def train_text_tokenizer(lines: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """GPT-2's kind: texts are followed by `<|endoftext|>`."""
    return PreTrainedTokenizerFast(
        tokenizer_object=train_byte_level_bpe(lines, vocab_size, [END_OF_TEXT], add_prefix_space=False),
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


def train_translation_tokenizer(pairs: dict[str, list[str]], vocab_size: int) -> PreTrainedTokenizerFast:
    """One vocabulary for both languages, with T5's special tokens: texts end in `</s>`."""
    texts = [text for side in pairs.values() for text in side]
    tokenizer = train_byte_level_bpe(texts, vocab_size, [PAD, END, UNKNOWN], add_prefix_space=True)
    tokenizer.post_processor = TemplateProcessing(
        single=f"$A {END}", special_tokens=[(END, tokenizer.token_to_id(END))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
    )


def train_byte_level_bpe(
    texts: Iterable[str], vocab_size: int, special_tokens: list[str], *, add_prefix_space: bool
) -> Tokenizer:
    """GPT-2's kind of tokenizer: no text is unknown to it, and decoding gives the text back.

    Args:
        texts: training text; the same texts give the same vocabulary.
        vocab_size: most entries wanted: special tokens, 256 bytes, and merges.
        special_tokens: they get the ids from 0 on.
        add_prefix_space: read a text as if a space stood before it, so that its first word has the
            entry that it has elsewhere.

    Raises:
        ValueError: `vocab_size` leaves no room for merges.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    minimum = len(alphabet) + len(special_tokens) + 1
    if vocab_size < minimum:
        raise ValueError(
            f"`vocab_size` must be at least {minimum}, for {len(alphabet)} bytes, special tokens and "
            f"merges (got {vocab_size})."
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special_tokens,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def token_fields(tokenizer: PreTrainedTokenizerBase, *tokens: str) -> dict[str, int | None]:
    """Fields of a model's config that follow from its tokenizer: its size, and ids of special tokens.

    Args:
        tokens: "bos", "eos" or "pad".
    """
    ids = {f"{token}_token_id": getattr(tokenizer, f"{token}_token_id") for token in tokens}
    return {"vocab_size": len(tokenizer), **ids}


def translation_token_fields(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """The same for a decoder, which begins with the padding token and ends with the end of text.

    Raises:
        ValueError: the tokenizer has none of one of them.
    """
    if tokenizer.pad_token_id is None or tokenizer.eos_token_id is None:
        raise ValueError(
            "The tokenizer must have a pad_token and an eos_token, for the decoder to begin and end "
            f"with (got {tokenizer.pad_token!r} and {tokenizer.eos_token!r})."
        )
    fields = token_fields(tokenizer, "eos", "pad")
    return {**fields, "decoder_start_token_id": tokenizer.pad_token_id}


def set_padding(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    """Make tokenizer and model pad with the same token: a classifier on GPT-2 reads the last one before
    the padding. It is the tokenizer's; without one, the model's; or else the end of text.

    Raises:
        ValueError: there is none of these.
    """
    config = model.config
    if tokenizer.pad_token is None:
        known = config.pad_token_id is not None and config.pad_token_id < len(tokenizer)
        token = tokenizer.eos_token
        token = tokenizer.convert_ids_to_tokens(config.pad_token_id) if known else token
        if token is None:
            raise ValueError(
                "The tokenizer must have a pad_token or an eos_token, for texts of several lengths (got "
                "neither): give another with `tokenizer_name`."
            )
        tokenizer.pad_token = token
        logger.info(f"The tokenizer has no pad_token: texts are padded with {token!r}.")
    if config.pad_token_id != tokenizer.pad_token_id:
        logger.info(f"The model's pad_token_id is {tokenizer.pad_token_id} now, as the tokenizer's.")
        config.pad_token_id = tokenizer.pad_token_id
