"""Turn a pretrained model into a gated one that starts from its weights.

from hf_moa import upcycle
model = upcycle("google-bert/bert-base-uncased", attention_type="mae")
"""

from __future__ import annotations

import copy
import os
from typing import TYPE_CHECKING, Any, cast

import transformers
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from .families import TASKS, Family, family_of
from .gated_models import is_instance_by_name, mechanisms_in
from .hub_names import check_source
from .importance import Importance
from .modeling.config.gating import GatingConfig
from .modeling.core.mechanism import MECHANISMS, field_names
from .pretrained_weights import convert, head_size
from .sorting import sort_by_importance

if TYPE_CHECKING:
    from .gated_models import GatedPreTrainedConfig

__all__ = ["TASKS", "upcycle"]


def upcycle(
    model_or_path: PreTrainedModel | str | os.PathLike,
    attention_type: str = "mha",
    *,
    task: str | None = None,
    model_class: type[PreTrainedModel] | str | None = None,
    load_kwargs: dict[str, Any] | None = None,
    importance: Importance | None = None,
    **config_fields: Any,
) -> PreTrainedModel:
    """The gated model of the same task class, with the source's weights.

    What the result computes, before any training:

    - `attention_type="mha"` and `"mae"` (any number of dropped heads): what the source computes. MAE
      gates start uniform.
    - with `cct_budgets`: what the source computes, at every budget in eval and in training (all gates
      open, biases of budgets zero). The paper's extra LayerNorms stay out (`cct_sublayer_norm=False`).
      Fields that are not given are not the paper's but those that keep a pretrained model to its budgets
      with the least loss: `cct_budget_bias=True`, `cct_control_symbols=False`,
      `cct_gate_training="hard"`, `cct_noise_max=1`, and where the largest budget is 1, which then is the
      source's architecture, finetuned beside the others, `cct_full_budget_is_plain=True`.
    - with `nested_budgets`: at budget 1 what the source computes, at the others what a part
      of its heads and neurons does. **Those need training**, and `importance` first.
    - `ffn_type="moe"`: what the source computes; every expert starts as a copy of its feed-forward
      layer (Komatsuzaki et al. 2023, "Sparse Upcycling").
    - `attention_type="moa"`: what the source computes. Every head keeps its keys and values, and starts
      N/k experts (Wq, Wo times k, since MoA's weights sum to 1, and in T5 its position bias), of which
      a token uses one; routers start at zero, so that all weights are 1/k. k is the source's number of
      heads, N is 2k unless `num_attention_experts` says otherwise. With fewer heads of keys and values
      (`num_key_value_heads=1` is the paper's) it is something else, which **needs further training**:
      one of them is the mean over a group of the source's, and routers start random.

    Args:
        model_or_path: a BERT, GPT-2 or T5 model (or a gated model with plain multi-head attention
            and CCT off), or the directory or Hub id of one.
        attention_type: "mha", "mae" or "moa".
        task: for a path, the head to load: "feature-extraction", "text-classification",
            "token-classification" or "question-answering"; for BERT "fill-mask" or
            "multiple-choice"; for GPT-2 "text-generation"; for T5 "text2text-generation" or
            "text-encoding" ((only the encoder)). A head that the checkpoint lacks starts random.
            Default: the class that the checkpoint names in `architectures`.
        model_class: the same as a class or class name, `MoaBertForMaskedLM` or `BertForMaskedLM`.
        load_kwargs: for a path, arguments of `from_pretrained` (`revision`, `dtype`, `num_labels`).
        importance: what `hf_moa.importance` found: the most important heads and neurons of every layer
            come first, where nested budgets and CCT's parts take them from. What the model computes
            changes by rounding only. Default: the source's order.
        config_fields: fields of the gated configuration, such as `num_attention_experts`.

    Returns:
        A model in eval mode, on the source's device, in its dtype. It shares no memory with it.

    Raises:
        ValueError: an unknown field, task or class; a source of another kind; a field that would
            change what the source computes (`pre_norm`, `cct_sublayer_norm=True`, sizes); `importance`
            of another model.
    """
    if isinstance(model_or_path, PreTrainedModel):
        if task is not None or model_class is not None or load_kwargs:
            raise ValueError(
                "task, model_class and load_kwargs choose how a path is loaded; with a model "
                f"({type(model_or_path).__name__}) leave them out."
            )
        source = model_or_path
    elif not isinstance(model_or_path, (str, os.PathLike)):
        raise ValueError(
            "model_or_path must be a model of transformers, or the directory or Hub id of one (got "
            f"{type(model_or_path).__name__}). A PEFT model's adapter is merged first: "
            "model.merge_and_unload()."
        )
    else:
        source = _load(model_or_path, task, model_class, load_kwargs or {})
    family = _family(source.config)
    name = type(source).__name__
    target_class = family.gated_class(_plain_name(name, family))
    _check_weights(source)
    config = _target_config(source.config, attention_type, config_fields)
    _, unused = family.aliases.get(name, (name, ()))
    state = {
        key: tensor.detach().clone()
        for key, tensor in source.state_dict().items()
        if not key.startswith(unused)
    }
    layout = family.layout(source.config)
    if importance is not None:
        state = sort_by_importance(state, layout, importance, source)
    state = convert(state, layout, config)
    model = build(target_class, config, state, source)
    for mechanism in mechanisms_in(config):
        if hasattr(part := mechanism.part("upcycling"), "start_gates"):
            part.start_gates(model, source.config)
    return model


def _load(
    path: str | os.PathLike,
    task: str | None,
    model_class: type[PreTrainedModel] | str | None,
    load_kwargs: dict[str, Any],
) -> PreTrainedModel:
    if task is not None and model_class is not None:
        raise ValueError(f"Give task or model_class, not both (got {task!r}, {model_class!r}).")
    hub = {
        name: load_kwargs[name]
        for name in ("revision", "token", "cache_dir", "subfolder", "local_files_only")
        if name in load_kwargs
    }
    check_source(path, "model_or_path")
    config = AutoConfig.from_pretrained(path, **hub)
    family = _family(config)
    if task is not None:
        if task not in family.tasks:
            raise ValueError(f"task must be one of {', '.join(family.tasks)} (got {task!r}).")
        name = family.tasks[task]
    elif model_class is not None:
        name = model_class if isinstance(model_class, str) else model_class.__name__
    elif config.architectures:
        name = config.architectures[0]
    else:
        raise ValueError(
            f"The config of {path} names no class in `architectures`: give task= or model_class=."
        )
    name = _plain_name(name, family)
    is_gated = is_instance_by_name(config, GatingConfig)
    source_class = family.gated_class(name) if is_gated else getattr(transformers, name)
    return source_class.from_pretrained(path, **load_kwargs)


def _check_weights(source: PreTrainedModel) -> None:
    """Raise a ValueError for weights that cannot be copied."""
    quantization = getattr(source.config, "quantization_config", None)
    if quantization is not None or getattr(source, "is_quantized", False):
        method = getattr(quantization, "quant_method", "a quantiser")
        method = getattr(method, "value", method)
        raise ValueError(
            f"model_or_path must have plain weights, which upcycle copies (got ones of {method}): load "
            "it without quantization_config, and quantise what upcycle makes of it."
        )
    tensors = source.state_dict()
    if any(".base_layer." in f".{key}" for key in tensors):
        raise ValueError(
            f"model_or_path must be without adapters (got a {type(source).__name__} with some): merge "
            "them first, model.merge_and_unload(), or take them off, model.unload()."
        )
    if away := [key for key, tensor in tensors.items() if tensor.is_meta]:
        raise ValueError(
            f"model_or_path must have its weights at hand (got {away[0]} on the meta device, as "
            "accelerate offloads it). Load it without 'cpu' or 'disk' in its device_map."
        )


def _plain_name(name: str, family: Family) -> str:
    """`MoaBertForMaskedLM` or `BertForPreTraining` -> `BertForMaskedLM`."""
    plain = name.removeprefix("Moa")
    plain, _ = family.aliases.get(plain, (plain, ()))
    if plain not in family.tasks.values():
        raise ValueError(
            f"There is no gated class for {name!r}; there is one for "
            f"{', '.join(family.tasks.values())}. Of a path, choose one with task= or model_class=; of "
            "a model, take its `base_model`."
        )
    return plain


def _family(config: PreTrainedConfig) -> Family:
    """The family of a source, which must be a plain one."""
    family = family_of(config)
    if mechanisms := mechanisms_in(config):
        raise ValueError(
            "upcycle takes a plain source: attention_type='mha', ffn_type='dense' and no budgets "
            f"(got attention_type={config.attention_type!r}, ffn_type={config.ffn_type!r}, "
            f"cct_budgets={config.cct_budgets!r}: "
            f"{', '.join(mechanism.name for mechanism in mechanisms)})."
        )
    return family


def _target_config(
    source: PreTrainedConfig, attention_type: str, config_fields: dict[str, Any]
) -> GatedPreTrainedConfig:
    family = family_of(source)
    allowed = {*field_names(), *family.extra_fields, "num_key_value_heads"}
    unknown = sorted(set(config_fields) - allowed)
    if unknown:
        raise ValueError(
            f"upcycle got fields that are no gating fields: {', '.join(unknown)}. "
            f"There are {', '.join(sorted(allowed))}."
        )
    inherited = source.to_dict()
    off = [name for mechanism in MECHANISMS.values() for name in mechanism.defaults]
    for name in ("model_type", "architectures", "auto_map", "transformers_version", *off):
        inherited.pop(name, None)
    if config_fields.get("cct_sublayer_norm"):
        raise ValueError(
            "cct_sublayer_norm must be False in upcycle: the extra LayerNorms would change what the "
            "source computes (got True)."
        )
    names = family.config_class.attribute_map
    head_dim = head_size(source)
    chosen = {"attention_type": attention_type} | config_fields
    for mechanism in MECHANISMS.values():
        if hasattr(part := mechanism.part("upcycling"), "default_fields"):
            chosen = part.default_fields(chosen, source) | chosen
    config = family.config_class(
        **inherited | {names.get(name, name): value for name, value in chosen.items()}
    )
    if getattr(config, "pre_norm", False) != inherited.get("pre_norm", False):
        raise ValueError(
            "pre_norm must stay as the source has it: moving the LayerNorms would change what it "
            f"computes (got {config.pre_norm!r})."
        )
    if config.head_dim != head_dim:
        raise ValueError(
            f"head_dim must be the source's, {head_dim}, whose heads the experts start from (got "
            f"{config.head_dim!r}); leave it out."
        )
    if attention_type == "moa":
        config.num_attention_experts = config.attention_experts
    return config


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
        without_pooler = getattr(source, "pooler", True) is None
        loaded: Any = target_class.from_pretrained(
            None,
            *([False] if without_pooler else []),  # add_pooling_layer of a base model
            config=config,
            state_dict=state,
            dtype=source.dtype,
            attn_implementation=source.config._attn_implementation,
            output_loading_info=True,
        )
        model, report = cast("tuple[PreTrainedModel, dict[str, Any]]", loaded)
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
    new = [name for name in report["missing_keys"] if name not in _gates(model)]
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
