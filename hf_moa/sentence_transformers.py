"""Gated models in sentence-transformers: a budget for each call of `encode`, and gates that learn.

The library needs nothing of this package but its import: a checkpoint's `modules.json` says that
`encode` takes a `budget`, and its configuration that gates learn in training (`carry_aux_loss`).

from hf_moa.sentence_transformers import upcycle
model = upcycle("sentence-transformers/all-MiniLM-L6-v2", nested_budgets=[1, 0.5])
model.encode(["a head may be dropped"], budget=0.5)
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import hf_moa

from .extras import from_extra
from .sentence_folders import sentence_modules, write_modules

with from_extra("sentence-transformers"):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Transformer

__all__ = ["upcycle"]


def upcycle(
    model_or_path: SentenceTransformer | str, attention_type: str = "mha", **config_fields: Any
) -> SentenceTransformer:
    """A sentence-transformers model with a gated transformer, that embeds as its source does; pooling
    and all that follows stay.

    Args:
        model_or_path: a model, or the folder or Hub id of one.
        attention_type, config_fields: see `hf_moa.upcycle`.

    Raises:
        ValueError: the first module is no transformer; what `hf_moa.upcycle` refuses.

    Example:
        >>> model = upcycle("sentence-transformers/all-MiniLM-L6-v2", nested_budgets=[1, 0.5])
        >>> model.encode(["a head"], budget=0.5).shape
        (1, 384)
    """
    source = model_or_path
    if not isinstance(source, SentenceTransformer):
        source = SentenceTransformer(source)
    transformer = source[0]
    if not isinstance(transformer, Transformer):
        raise ValueError(f"The first module must be a Transformer (got a {type(transformer).__name__}).")
    fields = {"carry_aux_loss": True} | config_fields
    gated = hf_moa.upcycle(transformer.auto_model, attention_type, **fields)
    with TemporaryDirectory() as folder:
        before, after = Path(folder, "before"), Path(folder, "after")
        source.save_pretrained(str(before), create_model_card=False)
        modules = sentence_modules(before) or []
        write_modules(before, modules, after)
        gated.save_pretrained(after / modules[0]["path"])
        transformer.tokenizer.save_pretrained(after / modules[0]["path"])
        return SentenceTransformer(str(after), device=str(source.device))
