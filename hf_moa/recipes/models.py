"""Which model a script trains: its flags, and the model and tokenizer that they name."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import datasets
from transformers import (
    AutoConfig,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import ADAPTER_CONFIG_NAME, CONFIG_NAME

from hf_moa.hub_names import check_source

from .command_line import optional
from .gating import GatingArguments, check_budgets, convert

if TYPE_CHECKING:
    from transformers.models.auto.auto_factory import _BaseAutoModelClass

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class HubArguments:
    """How models, tokenizers and data sets are fetched."""

    cache_dir: str | None = optional("Folder for what is downloaded from the Hub.")
    model_revision: str = field(
        default="main", metadata={"help": "Branch, tag or commit of the model on the Hub."}
    )
    token: str | None = optional("Access token for the Hub.")
    trust_remote_code: bool = field(
        default=False, metadata={"help": "Run model code that comes with a checkpoint."}
    )

    def hub_kwargs(self) -> dict:
        return {
            "cache_dir": self.cache_dir,
            "revision": self.model_revision,
            "token": self.token,
            "trust_remote_code": self.trust_remote_code,
        }

    def load_dataset(
        self, name: str, config: str | None = None, *, split: str | None = None
    ) -> datasets.DatasetDict | datasets.Dataset:
        """A data set of the Hub: all splits, or one.

        Raises:
            ValueError: it has no such split.
        """
        splits = datasets.load_dataset(name, config, cache_dir=self.cache_dir, token=self.token)
        if split is None:
            return splits
        if split not in splits:
            raise ValueError(f"`dataset_name` must have the split {split!r} (got {', '.join(splits)}).")
        return splits[split]


@dataclass(kw_only=True)
class AttentionArguments(HubArguments):
    """How a model is fetched and run."""

    attn_implementation: str | None = optional(
        "How attention is computed: eager, sdpa, flex_attention. (On a CPU, in bf16 and without "
        "dropout, models train faster with eager.) Default: transformers' choice."
    )

    def model_kwargs(self) -> dict:
        """Arguments of `from_pretrained`."""
        return self.hub_kwargs() | self.attention_kwargs()

    def attention_kwargs(self) -> dict:
        chosen = self.attn_implementation
        return {} if chosen is None else {"attn_implementation": chosen}


@dataclass
class CheckpointArguments(AttentionArguments):
    """Which checkpoint and tokenizer to start from."""

    model_name_or_path: str = field(
        metadata={"help": "Path of a pretrained model, or its name on the Hub."}
    )
    tokenizer_name: str | None = optional("Path or name of the tokenizer, if not that of the model.")

    def __post_init__(self):
        check_is_model(self.model_name_or_path)


@dataclass
class ModelArguments(AttentionArguments):
    """Which checkpoint to start from, or what to build from scratch; and the tokenizer."""

    model_name_or_path: str | None = optional(
        "Path of a pretrained model, or its name on the Hub. Default: from scratch."
    )
    model_type: str | None = optional("From scratch: the kind of model.")
    config_name: str | None = optional(
        "Path or name of a config: from scratch, instead of `model_type`; of a checkpoint, instead of "
        "its own."
    )
    config_overrides: str | None = optional(
        "From scratch: fields of the model's config, such as n_layer=4,n_embd=256."
    )
    tokenizer_name: str | None = optional(
        "Path or name of the tokenizer. Default: the checkpoint's; from scratch, one trained on the "
        "training text and saved with the model."
    )
    vocab_size: int = field(
        default=8192, metadata={"help": "Most entries of a tokenizer that is trained."}
    )

    def __post_init__(self):
        kinds = [self.model_name_or_path, self.model_type]
        if self.model_name_or_path is None:  # a checkpoint may have another config
            kinds.append(self.config_name)
        if sum(kind is not None for kind in kinds) != 1:
            raise ValueError(
                "Give either `model_name_or_path`, to start from a checkpoint, or `model_type` or "
                f"`config_name`, to start from scratch (got {self.model_name_or_path!r}, "
                f"{self.model_type!r} and {self.config_name!r})."
            )
        check_is_model(self.model_name_or_path)
        if self.model_name_or_path is not None and self.config_overrides is not None:
            raise ValueError(
                "`config_overrides` describes a model from scratch and needs `model_type` or "
                f"`config_name`, not `model_name_or_path` (got {self.config_overrides!r})."
            )


def check_is_model(name_or_path: str | None) -> None:
    """Raise a ValueError where the path is an adapter's, or there is none."""
    if name_or_path is None:
        return
    check_source(name_or_path, "`model_name_or_path`")
    is_adapter = Path(name_or_path, ADAPTER_CONFIG_NAME).is_file()
    if is_adapter and not Path(name_or_path, CONFIG_NAME).is_file():
        raise ValueError(
            f"`model_name_or_path` must be a model (got {name_or_path}, an adapter). Load it as its "
            "card (README.md) says, and save it with its base as a model: "
            '`model.merge_and_unload().save_pretrained("merged")`; the tokenizer is the adapter\'s, '
            f"`tokenizer_name` {name_or_path}."
        )


def load_tokenizer(
    model_args: CheckpointArguments | ModelArguments, checkpoint: str | Path | None = None
) -> PreTrainedTokenizerBase | None:
    """The tokenizer that the flags or a checkpoint to resume from name; None: one is to be trained."""
    name = model_args.tokenizer_name or model_args.model_name_or_path
    if name is not None:
        return AutoTokenizer.from_pretrained(name, **model_args.hub_kwargs())
    return None if checkpoint is None else AutoTokenizer.from_pretrained(checkpoint)


def load_model(
    auto_class: type[_BaseAutoModelClass],
    model_args: ModelArguments,
    gating_args: GatingArguments,
    tokenizer: PreTrainedTokenizerBase,
    token_fields: dict,
) -> PreTrainedModel:
    """The model to train.

    Args:
        auto_class: such as `AutoModelForCausalLM`.
        token_fields: config fields that follow from the tokenizer, for a model from scratch.
    """
    if model_args.model_name_or_path is None:
        model = auto_class.from_config(
            _new_config(model_args, gating_args, token_fields),
            trust_remote_code=model_args.trust_remote_code,
            **model_args.attention_kwargs(),
        )
        # under DeepSpeed's ZeRO-3 each process holds a part of them
        count = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
        logger.info(f"A new {type(model).__name__} with {count:,} parameters.")
        check_budgets(model, gating_args)
        return model
    config = (
        {}
        if model_args.config_name is None
        else {"config": _named_config(model_args.config_name, model_args)}
    )
    model = auto_class.from_pretrained(
        model_args.model_name_or_path, **config, **model_args.model_kwargs()
    )
    if len(tokenizer) > model.get_input_embeddings().num_embeddings:
        model.resize_token_embeddings(len(tokenizer))
    return convert(model, gating_args)


def _named_config(name: str, model_args: ModelArguments) -> PreTrainedConfig:
    return AutoConfig.from_pretrained(name, **model_args.hub_kwargs())


def _new_config(
    model_args: ModelArguments, gating_args: GatingArguments, token_fields: dict
) -> PreTrainedConfig:
    """A config from scratch: what is given, under the names that its class has for the fields."""
    if model_args.config_name is None:
        # one of the two is given
        default, known = AutoConfig.for_model(cast(str, model_args.model_type)), dict[str, Any]()
    else:
        default = _named_config(model_args.config_name, model_args)
        known = default.to_dict()
    fields: dict[str, Any] = {}
    for origin, given in (
        ("`config_overrides`", _parse_overrides(model_args.config_overrides)),
        ("the gating flags", gating_args.all_config_fields()),
        ("the tokenizer", token_fields),
    ):
        for alias, value in given.items():
            name = default.attribute_map.get(alias, alias)
            if not hasattr(default, name) and alias not in token_fields:
                raise ValueError(
                    f"`{alias}` must be a field of {type(default).__name__}, the config of "
                    f"`model_type` {default.model_type} (got it from {origin}). Gates need a "
                    "moa_ model."
                )
            if fields.setdefault(name, value) != value:
                raise ValueError(
                    f"`{alias}` must have one value (got {fields[name]!r}, and {value!r} from "
                    f"{origin}). Give it once."
                )
    return type(default)(**known | fields)


def _parse_overrides(overrides: str | None) -> dict:
    """`"n_layer=4,n_embd=256"` -> `{"n_layer": 4, "n_embd": 256}`."""
    fields = {}
    for item in (overrides or "").split(","):
        if not item.strip():
            continue
        name, equals, value = (part.strip() for part in item.partition("="))
        if not (name and equals and value):
            raise ValueError(
                "`config_overrides` must be a list like n_layer=4,n_embd=256 (got "
                f"{item!r} in {overrides!r})."
            )
        words = {"true": True, "false": False, "none": None}
        try:
            fields[name] = words[value.lower()] if value.lower() in words else json.loads(value)
        except json.JSONDecodeError:
            fields[name] = value
    return fields
