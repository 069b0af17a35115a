"""What a nested model computes at one budget as a model of its own."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING

from .families import Family, family_of
from .model_building import build
from .modeling.core.mechanism import field_names
from .modeling.nested.shapes import Shape, shapes_of
from .pretrained_weights import Layout

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def extract(model: PreTrainedModel, budget: float) -> PreTrainedModel:
    """See `GatedModel.extract`."""
    config: Any = model.config
    if not getattr(config, "nested_budgets", None):
        raise ValueError(
            f"extract needs a model with nested_budgets (got a {type(model).__name__} without)."
        )
    if config.attention_type != "mha":
        raise ValueError(
            "extract needs attention_type='mha': a plain model has no gates (got "
            f"{config.attention_type!r})."
        )
    if budget not in config.nested_budgets:
        raise ValueError(
            f"budget must be one of the model's budgets {config.nested_budgets} (got {budget!r})."
        )
    family = family_of(config)
    shape = shapes_of(config)[config.nested_budgets.index(budget)]
    target_class, target = _target(type(model).__name__.removeprefix("Moa"), config, family, shape)
    layout = family.layout(config)
    with torch.device("meta"):
        sizes = {key: value.shape for key, value in target_class(target).state_dict().items()}
    layers = None if config.nested_layers is None else shape.layers
    state = {key: _slice(model.state_dict(), key, size, layers, layout) for key, size in sizes.items()}
    return build(target_class, target, state, model)


def _target(
    name: str, config: Any, family: Family, shape: Shape
) -> tuple[type[PreTrainedModel], PreTrainedConfig]:
    """The class and the configuration of the smaller model: transformers' own, where that can have heads
    of this number and size."""
    heads, neurons, layers = family.layout.size_fields
    sizes = {heads: shape.heads, neurons: shape.neurons}
    if config.nested_layers is not None:
        sizes |= dict.fromkeys(layers, len(shape.layers))
    dropped = {"model_type", "architectures", "auto_map", "transformers_version"}
    dropped |= {*field_names(), "dtype"}
    inherited = {k: v for k, v in config.to_dict().items() if k not in dropped} | sizes
    plain_config: Any = CONFIG_MAPPING[family.model_type]
    is_plain = config.has_plain_backbone
    if "head_dim" in family.extra_fields and "d_kv" not in inherited:
        is_plain = is_plain and shape.heads * config.head_dim == config.hidden_size
        inherited["head_dim"] = config.head_dim
    if is_plain:
        own = family.config_class.__annotations__
        inherited = {k: v for k, v in inherited.items() if k not in own or hasattr(plain_config, k)}
        return getattr(transformers, name), plain_config(**inherited)
    return family.gated_class(name), family.config_class(**inherited)


def _slice(
    state: dict[str, Tensor],
    name: str,
    size: torch.Size,
    layers: tuple[int, ...] | None,
    layout: Layout,
) -> Tensor:
    """The smaller model's weight of a name: of the layer that is its layer (None: it has all), the first
    of everything."""
    layer = re.search(r"\.(\d+)\.", f".{name}")
    if layer and layers is not None:
        start, end = (place - 1 for place in layer.span(1))
        name = f"{name[:start]}{layers[int(layer[1])]}{name[end:]}"
    number = layout.num_matrices(name)
    parts = state[name].chunk(number, dim=-1)
    size = torch.Size([*size[:-1], size[-1] // number])
    return torch.cat([part[tuple(map(slice, size))] for part in parts], dim=-1)
