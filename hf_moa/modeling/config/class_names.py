"""The models in transformers' tables of class names, which its code and others' look classes up in.

`Trainer` shifts labels, `transformers serve` takes a model, and lm-evaluation-harness chooses an auto
class by the names in `MODEL_FOR_..._MAPPING_NAMES`. `AutoModel*.register` tells those tables nothing.
"""

from __future__ import annotations

from typing import Any

from transformers.models.auto import modeling_auto


def enter_class_names(config_class: Any) -> None:
    """Enter a family's classes in the table of every auto class that loads them."""
    for auto_name, model_name in config_class.auto_classes.items():
        # the table itself, which the auto class's mapping was made of
        names = getattr(modeling_auto, auto_name)._model_mapping._model_mapping
        names[config_class.model_type] = model_name
