"""What the mixins of models and configurations are to a type checker: models and configurations."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    ConfigMixin = PreTrainedConfig
    ModelMixin = PreTrainedModel
else:
    ConfigMixin = ModelMixin = object
