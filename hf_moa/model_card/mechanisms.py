"""The mechanisms of a model in words: what they do, their fields, and the papers.

What cards say of a mechanism is in its folder, in `card.py`, which may have:

    PHRASE: str  # what sets the model apart, in a few words; with it, the mechanism's name is a tag
    def in_words(config) -> str  # a paragraph
    def shown_fields(config, fields) -> dict[str, Any]  # those of its fields in use that are shown
    def citations(config) -> list[str]  # BibTeX entries

A field's meaning is the first sentence on it in the docstring of the mechanism's `fields`.
"""

from __future__ import annotations

from typing import Any

from hf_moa.field_meanings import field_meaning
from hf_moa.markdown import table
from hf_moa.modeling.config.gating import GatingConfig
from hf_moa.modeling.core.mechanism import MECHANISMS, mechanisms_of
from hf_moa.modeling.mae.card import PENG


def mechanism_tags(config: GatingConfig) -> list[str]:
    """Names of the mechanisms that the model has, such as "mae"."""
    return [m.name for m in mechanisms_of(config) if hasattr(m.part("card"), "PHRASE")]


def mechanism_phrases(config: GatingConfig) -> list[str]:
    """What sets the model apart, in a few words for each mechanism."""
    return [card.PHRASE for card in _cards_with(config, "PHRASE")]


def mechanisms_in_words(config: GatingConfig) -> str:
    """A paragraph for each mechanism, and the table of the fields that apply."""
    words = [card.in_words(config) for card in _cards_with(config, "in_words")]
    if config.attention_type == "mha":
        words.insert(0, "The attention is the backbone's own: multi-head, without gates.")
    rows = [
        [f"`{name}`", f"`{value}`", _meaning(config, name)]
        for name, value in fields_in_use(config).items()
    ]
    fields = "Fields of the configuration that apply to this model:"
    return "\n\n".join([*words, fields, table(["field", "value", "meaning"], rows)])


def fields_in_use(config: GatingConfig) -> dict[str, Any]:
    """The gating fields that change what this model is or how it trains, with their values."""
    found = {"attention_type": config.attention_type}
    for mechanism in mechanisms_of(config):
        if mechanism.ffn_type is not None:
            found["ffn_type"] = config.ffn_type
        unused, card = mechanism.unused(config), mechanism.part("card")
        names = [n for n in mechanism.defaults if n not in unused and not n.startswith("output_")]
        fields = {name: getattr(config, name) for name in names}
        found |= card.shown_fields(config, fields) if hasattr(card, "shown_fields") else fields
    return found


def citations(config: GatingConfig, *, is_ftg: bool) -> list[str]:
    """BibTeX entries of the papers whose mechanisms the model has, and of FTG's."""
    entries = [PENG] if is_ftg else []
    for card in _cards_with(config, "citations"):
        entries += card.citations(config)
    return list(dict.fromkeys(entries))


def _cards_with(config: GatingConfig, name: str) -> list[Any]:
    """The `card.py` of the model's mechanisms that have something of this name."""
    return [card for m in mechanisms_of(config) if hasattr(card := m.part("card"), name)]


def _meaning(config: GatingConfig, name: str) -> str:
    """Of a field: a family's own sentence on it comes first."""
    owners = (*type(config).__mro__, *(m.fields for m in MECHANISMS.values()))
    meanings = (field_meaning(owner.__doc__, name) for owner in owners)
    meaning = next(filter(None, meanings), "")
    return meaning[:1].upper() + meaning[1:]
