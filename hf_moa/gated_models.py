"""Finding gated models and their parts, also those of a checkpoint's own code.

A checkpoint that was loaded with `trust_remote_code=True` before `import hf_moa` has classes of its own,
which have the names of the package's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, cast

from torch import nn

from hf_moa.modeling.config.gating import GatingConfig
from hf_moa.modeling.core.gated_model import GatedModel
from hf_moa.modeling.core.mechanism import Mechanism, mechanisms_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel
    from typing_extensions import TypeIs

    class GatedPreTrainedConfig(GatingConfig, PreTrainedConfig):
        """What every gated configuration is: `GatingConfig` is a mixin."""

    class GatedPreTrainedModel(GatedModel, PreTrainedModel):
        """What every gated model is: `GatedModel` is a mixin."""

        config: GatedPreTrainedConfig


_Kind = TypeVar("_Kind")


def is_instance_by_name(thing: Any, kind: type[_Kind]) -> TypeIs[_Kind]:
    """Whether `thing` is an instance of the package's class `kind`, or of its namesake in a checkpoint's
    own code."""
    return any(each.__name__ == kind.__name__ for each in type(thing).__mro__)


def mechanisms_in(config: Any) -> list[Mechanism]:
    """The mechanisms that a configuration asks for; none where it is no gated model's."""
    return mechanisms_of(config) if is_instance_by_name(config, GatingConfig) else []


def gated_model_of(model: nn.Module) -> GatedPreTrainedModel:
    """The gated model in a wrapper of PEFT, `torch.compile` or `DataParallel`.

    Raises:
        ValueError: there is none.
    """
    for module in model.modules():
        if is_instance_by_name(module, GatedModel):
            return cast("GatedPreTrainedModel", module)
    raise ValueError(
        f"model must be one of hf_moa's, which have gates (got {type(model).__name__}); "
        "`hf_moa.upcycle` makes one of a BERT, GPT-2 or T5."
    )


def auto_class_names(config: Any) -> dict[str, str]:
    """A family's classes -> the auto class that loads each, by name; the first where several do."""
    names: dict[str, str] = {}
    for auto_class, name in config.auto_classes.items():
        names.setdefault(name, auto_class)
    return names
