"""transformers' own models, which must not be built with a gated configuration: they would leave the
gates out and compute something else.

They take one without a word: a `MoaT5Config` is a `T5Config`, and a `GPT2Config` reads the directory of
a `MoaGPT2LMHeadModel`. sentence-transformers, for one, gives every `T5Config` to `T5EncoderModel`.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from transformers.modeling_utils import PreTrainedModel

from ..core.mechanism import mechanisms_of

_GATED_CONFIGS: dict[str, Any] = {}  # by model type


class GatedConfigInPlainModelError(ValueError):
    """One of transformers' own models was to be built with a gated configuration."""


def refuse_in_plain_models(config_class: Any) -> None:
    """Have transformers' own models refuse a family's configurations that ask for a mechanism.

    What it adds to `PreTrainedModel.__init__` is a check. Classes from outside transformers may have
    such a configuration, and gated models inside.
    """
    _GATED_CONFIGS[config_class.model_type] = config_class
    plain_init: Any = PreTrainedModel.__init__
    if getattr(plain_init, "refuses_gated_configs", None) is _GATED_CONFIGS:
        return

    @wraps(plain_init)
    def refuse_or_init(self, config: Any, *inputs: Any, **kwargs: Any) -> None:
        if type(self).__module__.startswith("transformers.models."):
            _refuse(type(self).__name__, config)
        plain_init(self, config, *inputs, **kwargs)

    refuse_or_init.refuses_gated_configs = _GATED_CONFIGS  # type: ignore[attr-defined]  # a mark
    PreTrainedModel.__init__ = refuse_or_init  # type: ignore[method-assign]


def _refuse(model_name: str, config: Any) -> None:
    config_class = _GATED_CONFIGS.get(getattr(config, "model_type", ""))
    if config_class is None:
        return
    if not isinstance(config, config_class):  # a plain one, read from a gated model's directory
        config = config_class.from_dict(config.to_dict())
    if mechanisms := mechanisms_of(config):
        names = ", ".join(mechanism.name for mechanism in mechanisms)
        gated = ", ".join(sorted(set(config_class.auto_classes.values())))
        raise GatedConfigInPlainModelError(
            f"{model_name} must have a configuration without gates, which it would leave out (got one "
            f"of model type {config.model_type!r} with {names}). Take AutoModel..., or a gated class: "
            f"{gated}."
        )
