"""Architectures beside the families' own that `upcycle` takes: a family's classes can express them.

RoBERTa is BERT with other positions, and its weights have other names. A new one is an entry in
`of_bert.py` or `of_t5.py`, and a configuration field where it computes something that the family does
not.
"""

from __future__ import annotations

from transformers import PreTrainedConfig, PreTrainedModel

from hf_moa.families import FAMILIES
from hf_moa.modeling.core.family import Family

from . import of_bert, of_t5
from .relative import Relative

RELATIVES = (*of_bert.RELATIVES, *of_t5.RELATIVES)


def source_kind(config: PreTrainedConfig) -> Family | Relative:
    """What `upcycle` can take a model as: a family's own, or a relative.

    Raises:
        ValueError: it is neither.
    """
    for relative in RELATIVES:
        if config.model_type == relative.model_type:
            return relative
    for family in FAMILIES.values():
        if config.model_type in (family.model_type, family.config_class.model_type):
            return family
    known = ", ".join(map(repr, (*FAMILIES, *(relative.model_type for relative in RELATIVES))))
    raise ValueError(
        f"upcycle takes models of type {known} (got {config.model_type!r}). docs/upcycle.md says what "
        "each becomes."
    )


def to_family(model: PreTrainedModel) -> PreTrainedModel:
    """A relative as a model of its family, with plain attention; a family's own as it is."""
    kind = source_kind(model.config)
    return kind.to_family(model) if isinstance(kind, Relative) else model
