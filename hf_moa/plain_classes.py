"""`T5EncoderModel.from_pretrained` of a gated model's directory: the gated class."""

from __future__ import annotations

from functools import wraps
from typing import Any

import transformers
from transformers import PreTrainedModel
from transformers.utils import logging

from .modeling.config.gating import GatingConfig
from .modeling.config.plain_models import GatedConfigInPlainModelError
from .modeling.core.family import Family

logger = logging.get_logger(__name__)


def load_as_gated(family: Family) -> None:
    """Have the `from_pretrained` of a family's plain classes return the gated class for a gated
    checkpoint.

    Libraries choose a plain class by `isinstance(config, T5Config)`. Where there is no gated class of
    that name, or the call's `config` is a plain one, it raises a ValueError.
    """
    base = getattr(transformers, f"{family.prefix}PreTrainedModel")
    plain_loader = base.from_pretrained.__func__
    gated_classes = {name: family.gated_class(name) for name in family.tasks.values()}

    @wraps(plain_loader)
    def from_pretrained(cls: Any, path: Any, *args: Any, **kwargs: Any) -> PreTrainedModel:
        try:
            return plain_loader(cls, path, *args, **kwargs)
        except GatedConfigInPlainModelError:
            is_plain = getattr(transformers, cls.__name__, None) is cls
            gated = gated_classes.get(cls.__name__) if is_plain else None
            if gated is None or not isinstance(kwargs.get("config"), GatingConfig | None):
                raise
            logger.warning_once(
                f"{cls.__name__}.from_pretrained was given a gated checkpoint: what it returns is a "
                f"{gated.__name__}."
            )
        return gated.from_pretrained(path, *args, **kwargs)

    base.from_pretrained = classmethod(from_pretrained)
