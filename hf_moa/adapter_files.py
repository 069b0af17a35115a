"""PEFT adapters of gated models: what a card says of one, and where its base is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from typing import TYPE_CHECKING, Any, cast

from transformers import AutoConfig, PreTrainedModel

from .gated_models import is_instance_by_name
from .json_files import read_object
from .modeling.config.gating import GatingConfig
from .modeling.ftg.config import LOADERS, FTGConfig, saved_num_labels

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel

    from .gated_models import GatedPreTrainedConfig

# PEFT's names of tasks -> the classes that adapters for them are loaded onto.
_AUTO_CLASSES = {task: f"AutoModel{suffix}" for task, suffix in LOADERS.items()}
_AUTO_CLASSES["FEATURE_EXTRACTION"] = "AutoModel"
# Where the example scripts save a base that is nowhere else, in the adapter's folder.
BASE_FOLDER = "base_model"


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
    config: GatedPreTrainedConfig
    model_class: type | str | None
    base_folder: str | None = None
    trains: str | None = None

    @classmethod
    def of(cls, model: PreTrainedModel | PeftModel, folder: str | Path | None = None) -> Adapter:
        """That of a model, the first if it has several; saved to a folder.

        Raises:
            ValueError: the base model is not gated.
        """
        get_base_model = getattr(model, "get_base_model", None)
        base_model = model if get_base_model is None else get_base_model()
        peft_config = cast("PeftConfig", next(iter(model.peft_config.values())))
        base = peft_config.base_model_name_or_path or None
        peft_type = getattr(peft_config.peft_type, "value", peft_config.peft_type)
        config = _checked_gated(base_model.config, base)
        return cls(
            method=_method(cast(str, peft_type), getattr(peft_config, "plus", False)),
            base=base,
            config=config,
            model_class=type(base_model),
            base_folder=None if folder is None else base_beside(folder, base),
            trains=peft_config.in_words() if is_instance_by_name(peft_config, FTGConfig) else None,
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
        is_here = base is not None and Path(base).is_dir()
        source = base if is_here else base_model or base
        config = _config_of(source if base_folder is None else str(folder / base_folder))
        if labels := saved_num_labels(folder):
            config.num_labels = labels
        return cls(
            method=_method(method, facts.get("plus", False)),
            base=base,
            config=config,
            model_class=base_class_of(facts, config),
            base_folder=base_folder,
            trains=FTGConfig.from_pretrained(str(folder)).in_words() if method == "FTG" else None,
        )

    def facts(self) -> dict[str, Any]:
        """Arguments of `model_card`."""
        code = Path(self.base or "", f"modeling_{self.config.model_type}.py")
        # transformers looks for code where the adapter is; FTG is only in the package
        has_none = self.base_folder is not None or self.method.startswith("FTG")
        is_elsewhere = not self.base or not code.parent.is_dir()
        return {
            "model_class": self.model_class,
            "adapter": self.method,
            "adapter_trains": self.trains,
            "base_folder": self.base_folder,
            "carries_code": not has_none and (is_elsewhere or code.is_file()),
        }


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
    """The name of the class that an adapter is loaded onto: its task's, or the one that it was made on;
    None where the adapter does not say.

    Args:
        facts: of adapter_config.json.
        config: of the base model.
    """
    auto = _AUTO_CLASSES.get(facts.get("task_type") or "")
    return config.auto_classes.get(auto or "") or (facts.get("auto_mapping") or {}).get(
        "base_model_class"
    )


def _method(peft_type: str, plus: bool) -> str:
    return "FTG+" if peft_type == "FTG" and plus else peft_type


def _config_of(base: str | None) -> GatedPreTrainedConfig:
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
    return _checked_gated(config, base)


def _checked_gated(config: Any, base: str | None) -> GatedPreTrainedConfig:
    if not is_instance_by_name(config, GatingConfig):
        raise ValueError(
            f"The adapter's base must be a gated model (got {base}, of model_type "
            f"{getattr(config, 'model_type', None)!r}); PEFT writes the cards of others."
        )
    return cast("GatedPreTrainedConfig", config)
