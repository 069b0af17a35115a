"""Adapters: what a card says of a PEFT adapter, and the names that PEFT's own card of one lacks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from typing import Any

from huggingface_hub import ModelCard
from peft import PeftModel
from transformers import AutoConfig

from hf_moa.gated_models import is_instance_by_name
from hf_moa.modeling.core.configuration import GatingConfig
from hf_moa.modeling.ftg.config import LOADERS, FTGConfig, saved_num_labels

from .card import card_of
from .files import read_object

# PEFT's names of tasks -> the classes that adapters for them are loaded onto.
_AUTO_CLASSES = {task: f"AutoModel{suffix}" for task, suffix in LOADERS.items()}
_AUTO_CLASSES["FEATURE_EXTRACTION"] = "AutoModel"
# Where the example scripts save a base that is nowhere else, in the adapter's folder.
BASE_FOLDER = "base_model"
# What precedes the names in the card that `FTGConfig` writes.
_FTG_TITLE = re.compile(r"^(# FTG\+? )adapter of .*$", flags=re.MULTILINE)
_FTG_SNIPPET = re.compile(r'(PeftModel\w*\.from_pretrained\((?:base, )?")[^"]*')


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """A PEFT adapter of a gated model.

    Attributes:
        method: as PEFT names it: "FTG", "LORA"; and "FTG+".
        base: name or path of the base model; None where it has none.
        config: of the base model, with as many labels as the adapter's classifier has.
        model_class: of the base model, with the head that the adapter is for; None: the config says.
        base_folder: the folder in the adapter's own that the base lies in; None where it lies elsewhere.
        trains: what FTG trains, in a sentence; None of other methods.
    """

    method: str
    base: str | None
    config: GatingConfig
    model_class: str | None
    base_folder: str | None = None
    trains: str | None = None

    @classmethod
    def of(cls, model: PeftModel) -> Adapter:
        """That of a model, the first if it has several.

        Raises:
            ValueError: the base model is not gated.
        """
        base = model.get_base_model()
        name = next(iter(model.peft_config.values())).base_model_name_or_path or None
        _check_gated(base.config, name)
        return cls(
            method=peft_method(model.peft_config),
            base=name,
            config=base.config,
            model_class=type(base).__name__,
            trains=trained_in_words(model.peft_config),
        )

    @classmethod
    def in_folder(cls, folder: Path, *, base_model: str | None = None) -> Adapter:
        """That of a folder with adapter_config.json. The base's configuration is read from where the
        adapter names it or has it beside itself; where that is no folder, from `base_model`, if it is
        given.

        Raises:
            ValueError: the file is no adapter's; the configuration cannot be read, or is of no gated
                model.
        """
        facts = read_object(folder / "adapter_config.json")
        method, base = facts.get("peft_type"), facts.get("base_model_name_or_path") or None
        if not isinstance(method, str):
            raise ValueError(
                f"{folder / 'adapter_config.json'} must name the adapter's method, peft_type (got "
                f"{method!r}); give the folder that save_pretrained or MoaTrainer wrote."
            )
        base_folder = base_beside(folder, base)
        if base_folder is not None:
            source = str(folder / base_folder)
        else:
            source = base if base and Path(base).is_dir() else base_model or base
        config = _config_of(source)
        config.num_labels = saved_num_labels(folder) or config.num_labels
        model_class = base_class_of(facts, config)
        return cls(
            method=_method(method, facts.get("plus", False)),
            base=base,
            config=config,
            model_class=model_class,
            base_folder=base_folder,
            trains=FTGConfig.from_pretrained(folder).in_words() if method == "FTG" else None,
        )

    @property
    def base_carries_code(self) -> bool:
        """Whether both load without this package, with `trust_remote_code=True`, as far as it is here to
        be seen."""
        if self.base_folder is not None or self.method.startswith("FTG"):
            return False  # transformers looks for code where the adapter is; FTG is in the package alone
        folder = Path(self.base or "")
        code = folder / f"modeling_{self.config.model_type}.py"
        return not self.base or not folder.is_dir() or code.is_file()


def names_base_folder(base: str) -> bool:
    """Whether a path, of any system, ends in the name that the scripts give an adapter's base."""
    return PureWindowsPath(base).name == BASE_FOLDER  # it splits at both systems' separators


def base_beside(folder: str | Path, base: str | None) -> str | None:
    """The folder in an adapter's own that its base lies in; None where it lies elsewhere.

    Args:
        folder: the adapter's.
        base: what the adapter names. Of the name that the scripts give it, it is the one beside the
            adapter, where there is one: the two may have moved together, or been copied.
    """
    if not base:
        return None
    folder, path = Path(folder).resolve(), Path(base).resolve()
    if names_base_folder(base) and (folder / BASE_FOLDER).is_dir():
        return BASE_FOLDER
    is_inside = path.is_dir() and folder in path.parents
    return path.relative_to(folder).as_posix() if is_inside else None


def base_class_of(facts: Mapping[str, Any], config: GatingConfig) -> str | None:
    """The name of the class that an adapter is loaded onto: its task's, or the one that it was made on.

    Args:
        facts: of adapter_config.json.
        config: of the base model.

    Returns:
        None where the adapter does not say.
    """
    auto = _AUTO_CLASSES.get(facts.get("task_type"))
    return config.auto_classes.get(auto) or (facts.get("auto_mapping") or {}).get("base_model_class")


def peft_method(peft_configs: Mapping[str, Any] | None) -> str | None:
    """The method of the first adapter, as PEFT names it, or "FTG+"; None without one."""
    if not peft_configs:
        return None
    config = next(iter(peft_configs.values()))
    return _method(getattr(config.peft_type, "value", config.peft_type), getattr(config, "plus", False))


def trained_in_words(peft_configs: Mapping[str, Any] | None) -> str | None:
    """What the first adapter trains, in a sentence, if it is one of FTG; else None."""
    config = next(iter((peft_configs or {}).values()), None)
    return config.in_words() if is_instance_by_name(config, FTGConfig) else None


def _method(peft_type: str, plus: bool) -> str:
    return "FTG+" if peft_type == "FTG" and plus else peft_type


def with_names(card: ModelCard | None, *, name: str, base_model: str | None) -> ModelCard | None:
    """The card that `FTGConfig` writes, which knows no name of the adapter and may hold a path of the
    base, with both names; any other as it is.

    Args:
        card: None stays None.
        name: the adapter's id on the Hub, or its folder.
        base_model: the base model's id on the Hub.
    """
    if card is None or not _FTG_TITLE.search(card.text):
        return card
    title = f"adapter of {base_model or 'the base model'}"
    text = _FTG_TITLE.sub(lambda match: match[1] + title, card.text)
    return card_of(card.data, _FTG_SNIPPET.sub(lambda match: match[1] + name, text))


def _config_of(base: str | None) -> GatingConfig:
    if base is None:
        raise ValueError(
            "The adapter must name its base model (got no base_model_name_or_path); give the base's id "
            "on the Hub as base_model."
        )
    try:
        config = AutoConfig.from_pretrained(base)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"The adapter's base must be a model whose configuration can be read (got {base}: "
            f"{' '.join(str(error).split())[:200]})."
        ) from error
    _check_gated(config, base)
    return config


def _check_gated(config: Any, base: str | None) -> None:
    if not is_instance_by_name(config, GatingConfig):
        raise ValueError(
            f"The adapter's base must be a gated model (got {base}, of model_type "
            f"{getattr(config, 'model_type', None)!r}); PEFT writes the cards of others."
        )
