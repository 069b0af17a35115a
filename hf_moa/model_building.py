"""Makes a model of weights that another one had."""

from __future__ import annotations

import copy
import inspect
from typing import Any, cast

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging


def build(
    target_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    state: dict[str, Tensor],
    source: PreTrainedModel,
) -> PreTrainedModel:
    """A model of a class, a configuration and a state dict; what else it has is `source`'s.

    Raises:
        ValueError: the weights do not fit, gates aside.
    """
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # the new gates are no news here
    logging.disable_progress_bar()
    try:
        loaded: Any = target_class.from_pretrained(
            None,
            **_without_pooler(target_class, state),
            config=config,
            state_dict=state,
            dtype=source.dtype,
            # of a class that has eager attention only, nobody chose it
            attn_implementation=source.config._attn_implementation if source._supports_sdpa else None,
            output_loading_info=True,
        )
        model, report = cast("tuple[PreTrainedModel, dict[str, Any]]", loaded)
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
    gates = _gates(model)
    new = [name for name in report["missing_keys"] if name not in gates]
    if new or report["unexpected_keys"] or report["mismatched_keys"]:
        raise ValueError(
            f"The weights of {type(source).__name__} do not fit {target_class.__name__}: missing "
            f"{new}, unexpected {list(report['unexpected_keys'])}, of other shape "
            f"{list(report['mismatched_keys'])}."
        )
    model.config.name_or_path = source.name_or_path  # where the weights came from, for a model card
    model.name_or_path = ""  # but no adapter of this model could be loaded onto that
    if source.can_generate():
        model.generation_config = copy.deepcopy(source.generation_config)
    # its decorator hides that `to` is a method
    return model.to(source.device).eval()  # type: ignore[arg-type]


def _gates(model: PreTrainedModel) -> set[str]:
    """The parameters that the source cannot have: of gates, and CCT's control symbols."""
    return {
        f"{place}.{name}"
        for place, module in model.named_modules()
        if hasattr(module, "gate_kind") or "control_symbols" in module._modules
        for name in module.state_dict()
    }


def _without_pooler(target_class: type[PreTrainedModel], state: dict[str, Tensor]) -> dict[str, Any]:
    """What a base model is told where the source has no pooler."""
    has_choice = "add_pooling_layer" in inspect.signature(target_class).parameters
    if has_choice and not any(key.startswith("pooler.") for key in state):
        return {"add_pooling_layer": False}
    return {}
