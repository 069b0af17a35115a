"""FTG as a PEFT method: finding the gates of a model, and wrapping them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

from torch import nn

# In a `try`, so that a checkpoint's code loads where PEFT is not installed.
try:
    from peft import mapping
    from peft.tuners.tuners_utils import BaseTuner, check_target_module_exists
except ImportError:
    raise

from ..core.mechanism import shape_field_names
from .config import FTGConfig, FTGPeftType
from .layer import FTGLayer

_LAYER = re.compile(r"(?:^|\.)(?:layer|h|block)\.(\d+)\.")
# what every adapter must find the same in its model, beside the `shape_fields` of mechanisms
_FACTS = (
    "model_type",
    "attention_type",
    "ffn_type",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
)


class FTGModel(BaseTuner):
    """A model whose gates an adapter trains (Peng et al. 2020, section 5.2).

    Args:
        model: a gated model, or with `target_modules` any.
        config: its `FTGConfig`.
        adapter_name: name of the adapter.

    Raises:
        ValueError: nothing in the model is selected; it is not what the adapter was made for; a module
            to train is quantised, offloaded, or shared.
    """

    peft_config: dict[str, FTGConfig]  # type: ignore[assignment]  # all of this kind
    prefix: str = "ftg_"
    tuner_layer_cls = FTGLayer
    target_module_mapping: dict[str, Any] = {}  # noqa: RUF012 - PEFT's form

    def inject_adapter(self, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        """As in PEFT, once it is known what the adapter selects and that the model is its own."""
        config = self.peft_config[adapter_name]
        self._find_targets(model, config, adapter_name)
        if not config.inference_mode:
            _warn_of_budgets_that_look_the_same(model, config)
        super().inject_adapter(model, adapter_name, *args, **kwargs)

    def _find_targets(self, model: nn.Module, config: FTGConfig, adapter_name: str) -> None:
        if config.target_modules is None:
            selected = set(selected_modules(model, config))
            config.target_modules = selected  # type: ignore[assignment]  # as PEFT holds it
        facts = _facts(model)
        if config.made_for is None:
            config.made_for = facts or None
            return
        differing = {
            name: (value, facts.get(name))
            for name, value in config.made_for.items()
            if facts.get(name) != value
        }
        if differing:
            found = "; ".join(f"{k}={v[0]!r}, not {v[1]!r}" for k, v in differing.items())
            raise ValueError(
                f"The adapter {adapter_name!r} was made for another model: {found}. Load the base model "
                "that it names, or train one for this model."
            )

    @contextmanager
    def _enable_peft_forward_hooks(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Refuse what other methods do here: a batch whose rows have adapters of their own."""
        names = kwargs.get("adapter_names")
        if names is not None:
            raise ValueError(
                f"FTG computes a batch with one adapter (got adapter_names={names!r}): split the batch, "
                "and choose the adapter of each part with set_adapter."
            )
        yield

    # PEFT gives a method its own kind of configuration
    def _prepare_adapter_config(  # type: ignore[override]
        self, peft_config: FTGConfig, model_config: dict
    ) -> FTGConfig:
        return peft_config  # the modules are found already

    @staticmethod
    def _check_target_module_exists(  # type: ignore[override]  # the same
        peft_config: FTGConfig, key: str
    ) -> Any:
        # PEFT knows no layer by its number in a model without a prefix, as GPT-2's `h.0`
        of_all_layers = copy(peft_config)
        of_all_layers.layers_to_transform = None
        found = check_target_module_exists(of_all_layers, key)
        return False if found and not _is_chosen(key, peft_config) else found

    def _create_and_replace(  # type: ignore[override]  # the same
        self,
        peft_config: FTGConfig,
        adapter_name: str,
        target: nn.Module,
        target_name: str,
        parent: nn.Module,
        current_key: str,
        parameter_name: str | None = None,
    ) -> None:
        if isinstance(target, FTGLayer):
            target.update_layer(adapter_name, peft_config)
            return
        if not all(p.is_floating_point() for p in target.parameters()):
            raise ValueError(
                f"FTG copies the module {current_key}, which is quantised and cannot be trained. Leave "
                "it out when quantising (a gate is left out by default, and llm_int8_skip_modules or "
                "modules_to_not_convert leave out others), or use exclude_modules."
            )
        is_offloaded = any("_hf_hook" in vars(module) for module in self.model.modules())
        if is_offloaded and any(p.is_meta for p in target.parameters()):
            raise ValueError(
                f"FTG copies the module {current_key}, which must have its weights at hand (got one "
                "that accelerate offloads). Load the base model with a device_map without 'cpu' and "
                "'disk' beside an accelerator, and without cpu_offload."
            )
        places = [n for n, m in self.model.named_modules(remove_duplicate=False) if m is target]
        if len(places) > 1:
            raise ValueError(f"FTG cannot adapt a module that is shared: {', '.join(places)}.")
        layer = FTGLayer(target, adapter_name, peft_config)
        if adapter_name not in self.active_adapters:
            layer.requires_grad_(False)
        self._replace_module(parent, target_name, layer, target)

    def _replace_module(
        self, parent: nn.Module, child_name: str, new_module: nn.Module, child: nn.Module
    ) -> None:
        setattr(parent, child_name, new_module)
        new_module.train(parent.training)

    @classmethod
    def _remove_adapter_name_from_key(cls, key: str, adapter_name: str) -> str:
        return key.replace(f".ftg_modules.{adapter_name}.", ".ftg_modules.", 1)


def selected_modules(model: nn.Module, config: FTGConfig) -> list[str]:
    """Names of the modules that the config's gates, `plus` and layers select.

    Raises:
        ValueError: there are none; the message says what the model has.
    """
    kinds = _gates(model)
    names = [name for name, kind in kinds.items() if kind in config.gates]
    if config.plus:
        names += _output_projections(model)
    names = [name for name in names if _is_chosen(name, config)]
    if not names:
        found = sorted(set(kinds.values()))
        raise ValueError(
            f"FTG selects nothing in this {type(model).__name__} with gates={list(config.gates)!r}, "
            f"plus={config.plus} and layers_to_transform={config.layers_to_transform!r}: it has "
            + (f"gates of {', '.join(found)}" if found else "no gates")
            + f" in the layers {sorted({n for n in map(_layer, kinds) if n is not None})}. Convert a "
            "plain model with hf_moa.upcycle first."
        )
    return names


def _gates(model: nn.Module) -> dict[str, str]:
    """Names of the gating modules, and of what kind they are; adapted ones under their own names."""
    found: dict[str, str] = {}
    adapted: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if name.startswith(adapted):
            continue
        if isinstance(module, FTGLayer):
            adapted += (f"{name}.",)
            module = module.get_base_layer()
        # by mark, not by class: a checkpoint may have brought its own classes
        kind = getattr(module, "gate_kind", None)
        if kind is not None:
            found[name] = kind
    return found


def _output_projections(model: nn.Module) -> list[str]:
    return [
        f"{name}.{module.output_projection}"
        for name, module in model.named_modules()
        if isinstance(getattr(module, "output_projection", None), str)  # mixtures: a method
    ]


def _warn_of_budgets_that_look_the_same(model: nn.Module, config: FTGConfig) -> None:
    """Gates without a bias for each budget cannot tell budgets apart while the symbols that stand for
    them are all zero."""
    if any(module._parameters.get("budget_bias") is not None for module in model.modules()):
        return
    chosen = (config.modules_to_save, config.target_modules)
    names = [name for each in chosen for name in ([each] if isinstance(each, str) else each or [])]
    if "cct" not in config.gates or any(name.split(".")[-1] == "control_symbols" for name in names):
        return
    symbols = [m for n, m in model.named_modules() if n.split(".")[-1] == "control_symbols"]
    weights = [symbol.weight for symbol in symbols if isinstance(symbol, nn.Embedding)]
    if any(len(weight) > 1 and not weight.is_meta and not weight.any() for weight in weights):
        warnings.warn(
            "The control symbols of this CCT model are zero, as those of a converted checkpoint are: "
            "gates that this adapter trains cannot tell budgets apart. Train the symbols, too: "
            'FTGConfig(modules_to_save=["control_symbols"]).',
            stacklevel=2,
        )


def _is_chosen(name: str, config: FTGConfig) -> bool:
    """Whether a module is in one of `layers_to_transform`."""
    chosen = config.layers_to_transform
    return chosen is None or _layer(name) in ([chosen] if isinstance(chosen, int) else chosen)


def _layer(name: str) -> int | None:
    match = _LAYER.search(name)
    return None if match is None else int(match.group(1))


def _facts(model: nn.Module) -> dict[str, Any]:
    """What an adapter must find in a model to fit it; nothing for a model that is not gated."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "listed_budgets"):
        return {}
    facts = {name: getattr(config, name, None) for name in (*_FACTS, *shape_field_names())}
    # as JSON has them; an adapter's control symbols each stand for one
    listed = config.listed_budgets if config.has_cct else []
    budgets = [list(each) if isinstance(each, tuple) else each for each in listed]
    return facts | {"cct": config.has_cct, "cct_budgets": budgets}


def register() -> None:
    """Make PEFT know the method. A second copy of this code leaves the first in place."""
    kind: Any = FTGPeftType.FTG  # no member of PEFT's own enumeration
    if kind in mapping.PEFT_TYPE_TO_CONFIG_MAPPING:
        return
    if FTGModel.prefix in mapping.PEFT_TYPE_TO_PREFIX_MAPPING.values():
        raise KeyError(f"There is already a PEFT method with the prefix {FTGModel.prefix!r}.")
    mapping.PEFT_TYPE_TO_CONFIG_MAPPING[kind] = FTGConfig
    mapping.PEFT_TYPE_TO_TUNER_MAPPING[kind] = FTGModel
    mapping.PEFT_TYPE_TO_PREFIX_MAPPING[kind] = FTGModel.prefix


register()
