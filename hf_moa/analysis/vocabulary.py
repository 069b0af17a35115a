"""Names and kinds of tokens."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from typing import Any

TOKEN_KINDS = ("word", "word piece", "number", "punctuation", "special")
_WORD_BOUNDARIES = ("▁", "Ġ", "Ċ")  # of SentencePiece, and of byte-level BPE


class Vocabulary:
    """What tables call the tokens.

    Args:
        tokenizer: of the model; None names tokens by their ids.
        kind_of: token -> its kind, for the preferences of experts by kind, such as a lexicon's part of
            speech; default: one of `TOKEN_KINDS`, by the token's characters.
    """

    def __init__(self, tokenizer: Any = None, kind_of: Callable[[str], str] | None = None):
        self.tokenizer = tokenizer
        self.special_ids = [] if tokenizer is None else sorted(set(tokenizer.all_special_ids))
        self._special_tokens = set() if tokenizer is None else set(tokenizer.all_special_tokens)
        self._kind_of = kind_of
        # byte-level and SentencePiece vocabularies mark beginnings of words, WordPiece the others
        tokens = [] if tokenizer is None else list(tokenizer.get_vocab())
        self._is_byte_level = any(token.startswith("Ġ") for token in tokens)
        self._marks_words = any(token.startswith(_WORD_BOUNDARIES) for token in tokens) and not any(
            token.startswith("##") and len(token) > 2 for token in tokens
        )

    def name(self, token_id: int) -> str:
        """The token as its vocabulary has it; one that is bytes as their text, if they are one."""
        if self.tokenizer is None:
            return str(token_id)
        token = self.tokenizer.convert_ids_to_tokens(token_id)
        if token is None:
            return str(token_id)
        if self._is_byte_level and not token.lstrip("Ġ").isascii() and token not in self._special_tokens:
            text = self.tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
            if text.strip(" ") and text.isprintable() and "\ufffd" not in text:
                return "Ġ" * (len(text) - len(text.lstrip(" "))) + text.lstrip(" ")
        return token

    def kind(self, token_id: int) -> str:
        token = self.name(token_id)
        if token in self._special_tokens:
            return "special"
        if self._kind_of is not None:
            return self._kind_of(token)
        text = token.removeprefix("##")
        begins_word = token.startswith(_WORD_BOUNDARIES) if self._marks_words else text == token
        text = text.lstrip("".join(_WORD_BOUNDARIES))
        if any(character.isdigit() for character in text):
            return "number"
        if text and all(unicodedata.category(character)[0] in "PS" for character in text):
            return "punctuation"
        return "word" if begins_word else "word piece"
