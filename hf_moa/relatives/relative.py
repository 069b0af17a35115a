"""What is declared of an architecture that a family's classes can express."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from hf_moa.model_building import build
from hf_moa.modeling.core.family import Family


@dataclass(frozen=True, kw_only=True)
class Relative:
    """An architecture of transformers whose models are a family's, under other names and with other
    fields of the configuration.

    Args:
        model_type: of transformers' configuration, such as "roberta".
        prefix: of its classes' names, such as "Roberta".
        family: whose classes express it.
        fields: `(config, class name) -> fields` of the family's configuration, beside those that both
            have under one name. It raises a ValueError for what the family cannot express.
        names: of weights: a regular expression -> what stands instead of it in the family's.
        own_classes: task -> class, behind the prefix, where it is called other than the family's.
    """

    model_type: str
    prefix: str
    family: Family
    fields: Callable[[Any, str], dict[str, Any]]
    names: dict[str, str] = field(default_factory=dict)
    own_classes: dict[str, str] = field(default_factory=dict)

    @property
    def tasks(self) -> dict[str, str]:
        """Task -> transformers' class, by name."""
        shared = {
            task: name.removeprefix(self.family.prefix)
            for task, name in self.family.tasks.items()
            if task not in self.family.tasks_of_relatives
        }
        return {task: self.prefix + name for task, name in (shared | self.own_classes).items()}

    @property
    def aliases(self) -> dict[str, Any]:
        """None; see `Family`."""
        return {}

    def to_family(self, model: PreTrainedModel) -> PreTrainedModel:
        """The family's model, with plain attention, that computes what `model` does.

        Raises:
            ValueError: it has something that the family does not know.
        """
        name = type(model).__name__
        task = {name: task for task, name in self.tasks.items()}[name]
        target_class = self.family.gated_class(self.family.tasks[task])
        config = self._config(model.config, name)
        state = {self._renamed(key): tensor for key, tensor in model.state_dict().items()}
        return build(target_class, config, state, model)

    def _config(self, source: PreTrainedConfig, class_name: str) -> PreTrainedConfig:
        target = self.family.config_class
        known = {each.name for each in dataclasses.fields(target)}
        dropped = {each.name for each in dataclasses.fields(source)} - known
        dropped |= {"model_type", "architectures", "auto_map", "transformers_version"}
        inherited = {name: value for name, value in source.to_dict().items() if name not in dropped}
        return target(**inherited | self.fields(source, class_name))

    def _renamed(self, key: str) -> str:
        for pattern, name in self.names.items():
            key = re.sub(pattern, name, key)
        return key


def must_be(config: PreTrainedConfig, name: str, expected: Any, reason: str) -> None:
    """Raise a ValueError where a field of a relative's configuration is not what its class takes for
    granted, or the family does."""
    if (value := getattr(config, name)) != expected:
        raise ValueError(
            f"{type(config).__name__}.{name} must be {expected!r} in upcycle: {reason} (got {value!r})."
        )
