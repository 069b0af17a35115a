"""The backbones that there are: each folder of `modeling` declares a `Family`.

A new one is a folder with its configuration, layers, models, layout and `family.py`, and an entry in
`FAMILIES`, or from outside the package a call of `hf_moa.registration.register_family`; upcycling, model
cards and the command line go through `FAMILIES`.
"""

from __future__ import annotations

from transformers import PreTrainedConfig

from .modeling.bert.family import BERT
from .modeling.core.family import Family
from .modeling.gpt2.family import GPT2
from .modeling.t5.family import T5

FAMILIES = {family.model_type: family for family in (BERT, GPT2, T5)}


def family_of(config: PreTrainedConfig) -> Family:
    """The family of a gated configuration, or of its backbone's own.

    Raises:
        ValueError: there is none.
    """
    for family in FAMILIES.values():
        if config.model_type in (family.model_type, family.config_class.model_type):
            return family
    known = ", ".join(map(repr, FAMILIES))
    raise ValueError(f"config must be of a gated model, or of type {known} (got {config.model_type!r}).")
