"""Turn a pretrained model into a gated one that starts from its weights.

from hf_moa import upcycle
model = upcycle("google-bert/bert-base-uncased", attention_type="mae")
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import transformers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from .families import family_of
from .gated_models import is_instance_by_name, mechanisms_in
from .hub_names import check_source
from .importance import Importance
from .model_building import build
from .modeling.config.gating import GatingConfig
from .modeling.core.family import Family
from .modeling.core.mechanism import MECHANISMS, field_names
from .pretrained_weights import convert, head_size
from .relatives import source_kind, to_family
from .relatives.relative import Relative
from .sorting import sort_by_importance

if TYPE_CHECKING:
    from .gated_models import GatedPreTrainedConfig

__all__ = ["upcycle"]


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
      one of them is the mean over a group of the source's.

    Args:
        model_or_path: a BERT, GPT-2 or T5 model or one of a relative of theirs, such as RoBERTa (see
            `hf_moa.relatives`), or a gated model with plain multi-head attention and CCT off; or the
            directory or Hub id of one.
        attention_type: "mha", "mae" or "moa".
        task: for a path, the head to load: "feature-extraction", "text-classification",
            "token-classification" or "question-answering"; for BERT "fill-mask" or
            "multiple-choice"; for ELECTRA "replaced-token-detection"; for GPT-2 "text-generation"; for
            T5 "text2text-generation" or "text-encoding" (only the encoder). A head that the checkpoint
            lacks starts random. Default: the class that the checkpoint names in `architectures`.
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
    kind = _kind(source.config)
    _plain_name(type(source).__name__, kind)
    _check_weights(source)
    source = to_family(source)
    family, name = family_of(source.config), type(source).__name__
    target_class = family.gated_class(_plain_name(name, family))
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
    return build(target_class, config, state, source)


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
    kind = _kind(config)
    if task is not None:
        if task not in kind.tasks:
            raise ValueError(f"task must be one of {', '.join(kind.tasks)} (got {task!r}).")
        name = kind.tasks[task]
    elif model_class is not None:
        name = model_class if isinstance(model_class, str) else model_class.__name__
    elif config.architectures:
        name = config.architectures[0]
    else:
        raise ValueError(
            f"The config of {path} names no class in `architectures`: give task= or model_class=."
        )
    name = _plain_name(name, kind)
    if isinstance(kind, Family) and is_instance_by_name(config, GatingConfig):
        source_class: Any = kind.gated_class(name)
    else:
        source_class = getattr(transformers, name, None)
    if source_class is None:
        raise ValueError(f"task must be one that transformers has a class for (got {task!r}: {name}).")
    _check_labels(name, load_kwargs)
    try:
        return source_class.from_pretrained(path, **load_kwargs)
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):
            raise
        raise ValueError(
            f"num_labels must be the checkpoint's, whose head has another size than {name} would have "
            f"(got {load_kwargs}). With ignore_mismatched_sizes=True in load_kwargs, or "
            "--ignore-mismatched-sizes, the head starts random."
        ) from error


def _check_labels(class_name: str, load_kwargs: dict[str, Any]) -> None:
    """Refuse labels of a class that has no classifier, which would leave them out."""
    given = [name for name in ("num_labels", "id2label") if name in load_kwargs]
    if given and not class_name.endswith(("ForSequenceClassification", "ForTokenClassification")):
        raise ValueError(
            f"{given[0]} must be left out for {class_name}, which has no classifier of labels (got "
            f"{load_kwargs[given[0]]!r}). Choose one with task='text-classification'."
        )
    if not isinstance(number := load_kwargs.get("num_labels", 1), int) or number < 1:
        raise ValueError(f"num_labels must be an integer of at least 1 (got {number!r}).")
    if len(set(names := list(load_kwargs.get("id2label", {}).values()))) != len(names):
        raise ValueError(f"id2label must hold each name once (got {names}).")


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


def _plain_name(name: str, kind: Family | Relative) -> str:
    """`MoaBertForMaskedLM` or `BertForPreTraining` -> `BertForMaskedLM`."""
    plain = name.removeprefix("Moa")
    plain, _ = kind.aliases.get(plain, (plain, ()))
    if plain not in kind.tasks.values():
        raise ValueError(
            f"There is no gated class for {name!r}; there is one for "
            f"{', '.join(kind.tasks.values())}. Of a path, choose one with task= or model_class=; of "
            "a model, take its `base_model`."
        )
    return plain


def _kind(config: PreTrainedConfig) -> Family | Relative:
    """What kind of model a source is; it must be a plain one."""
    kind = source_kind(config)
    if mechanisms := mechanisms_in(config):
        raise ValueError(
            "upcycle takes a plain source: attention_type='mha', ffn_type='dense' and no budgets "
            f"(got attention_type={config.attention_type!r}, ffn_type={config.ffn_type!r}, "
            f"cct_budgets={config.cct_budgets!r}: "
            f"{', '.join(mechanism.name for mechanism in mechanisms)})."
        )
    return kind


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
