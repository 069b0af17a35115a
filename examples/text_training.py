"""What the example scripts that train on text files share: files, tokenizer, model, `Trainer` runs."""

import io
import json
import logging
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import transformers
from gating_arguments import GatingArguments, convert, optional
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoTokenizer,
    HfArgumentParser,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import ADAPTER_CONFIG_NAME, CONFIG_NAME

from hf_moa.hub_names import hub_name

logger = logging.getLogger(__name__)

IGNORE_INDEX = -100


@dataclass(kw_only=True)
class HubArguments:
    """How models and tokenizers are fetched."""

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


@dataclass
class CheckpointArguments(HubArguments):
    """Which checkpoint and tokenizer to start from."""

    model_name_or_path: str = field(
        metadata={"help": "Path of a pretrained model, or its name on the Hub."}
    )
    tokenizer_name: str | None = optional("Path or name of the tokenizer, if not that of the model.")

    def __post_init__(self):
        check_is_model(self.model_name_or_path)


@dataclass
class ModelArguments(HubArguments):
    """Which checkpoint to start from, or what to build from scratch; and the tokenizer."""

    model_name_or_path: str | None = optional(
        "Path of a pretrained model, or its name on the Hub. Default: from scratch."
    )
    model_type: str | None = optional("From scratch: the kind of model.")
    config_name: str | None = optional(
        "Path or name of a config: from scratch, in the place of `model_type`; of a checkpoint, in the "
        "place of its own."
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
    """Raise a ValueError where the path is an adapter's."""
    if name_or_path is None:
        return
    is_adapter = Path(name_or_path, ADAPTER_CONFIG_NAME).is_file()
    if is_adapter and not Path(name_or_path, CONFIG_NAME).is_file():
        raise ValueError(
            f"`model_name_or_path` must be a model (got {name_or_path}, an adapter). Load it as its "
            "card (README.md) says, and save it with its base as a model: "
            '`model.merge_and_unload().save_pretrained("merged")`; the tokenizer is the adapter\'s, '
            f"`tokenizer_name` {name_or_path}."
        )


_SAMPLED = ("train", "eval", "predict")


def parse_arguments(args: list[str] | None, *classes: type):
    """The command line, or the one JSON file that it names, as instances of the dataclasses."""
    args = sys.argv[1:] if args is None else args
    parser = HfArgumentParser(classes)
    if len(args) == 1 and args[0].endswith(".json"):
        parsed = parser.parse_json_file(args[0])
    else:
        parsed = parser.parse_args_into_dataclasses(args)
    for each in parsed:
        check_counts(each, *vars(each).keys() & {f"max_{use}_samples" for use in _SAMPLED})
    return parsed


def check_counts(arguments: Any, *names: str) -> None:
    """Raise a ValueError where one of these flags is given and less than 1."""
    for name in names:
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ValueError(f"`{name}` must be at least 1 (got {value}).")


def set_up_logging(training_args: TrainingArguments, *loggers: logging.Logger) -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):  # text that a console cannot show ends no run
        sys.stdout.reconfigure(errors="replace")
    logging.basicConfig(
        format="%(asctime)s - %(levelname)s - %(name)s - %(message)s",
        datefmt="%m/%d/%Y %H:%M:%S",
        handlers=[logging.StreamHandler(sys.stdout)],
    )
    if training_args.should_log:
        # The default --log_level, "passive", keeps what is set here.
        transformers.utils.logging.set_verbosity_info()
    level = training_args.get_process_log_level()
    for each in (logger, *loggers):
        each.setLevel(level)
    datasets.utils.logging.set_verbosity(level)
    transformers.utils.logging.set_verbosity(level)
    logger.info(f"Training parameters: {training_args}")


def find_checkpoint(training_args: TrainingArguments) -> str | None:
    """The checkpoint to resume from: the one asked for, or the last one in `output_dir`."""
    if training_args.resume_from_checkpoint is not None:
        return training_args.resume_from_checkpoint
    if not (training_args.do_train and Path(training_args.output_dir).is_dir()):
        return None
    checkpoint = get_last_checkpoint(training_args.output_dir)
    if checkpoint is not None:
        logger.info(f"Resuming from {checkpoint}; to train anew, give another --output_dir.")
    return checkpoint


def load_tokenizer(
    model_args: CheckpointArguments | ModelArguments, checkpoint: str | Path | None = None
) -> PreTrainedTokenizerBase | None:
    """The tokenizer that the flags or a checkpoint to resume from name; None: one is to be trained."""
    name = model_args.tokenizer_name or model_args.model_name_or_path
    if name is not None:
        return AutoTokenizer.from_pretrained(name, **model_args.hub_kwargs())
    return None if checkpoint is None else AutoTokenizer.from_pretrained(checkpoint)


def set_padding(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    """Make tokenizer and model pad with the same token: a classifier on GPT-2 reads the last one before
    the padding. It is the tokenizer's; without one, the model's; or else the end of text.

    Raises:
        ValueError: there is none of these.
    """
    config = model.config
    if tokenizer.pad_token is None:
        known = config.pad_token_id is not None and config.pad_token_id < len(tokenizer)
        token = tokenizer.eos_token
        token = tokenizer.convert_ids_to_tokens(config.pad_token_id) if known else token
        if token is None:
            raise ValueError(
                "The tokenizer must have a pad_token or an eos_token, for texts of several lengths (got "
                "neither): give another with `tokenizer_name`."
            )
        tokenizer.pad_token = token
        logger.info(f"The tokenizer has no pad_token: texts are padded with {token!r}.")
    if config.pad_token_id != tokenizer.pad_token_id:
        logger.info(f"The model's pad_token_id is {tokenizer.pad_token_id} now, as the tokenizer's.")
        config.pad_token_id = tokenizer.pad_token_id


def train_byte_level_bpe(
    texts: Iterable[str], vocab_size: int, special_tokens: list[str], *, add_prefix_space: bool
) -> Tokenizer:
    """GPT-2's kind of tokenizer: no text is unknown to it, and decoding gives the text back.

    Args:
        texts: training text; the same texts give the same vocabulary.
        vocab_size: most entries wanted: special tokens, 256 bytes, and merges.
        special_tokens: they get the ids from 0 on.
        add_prefix_space: read a text as if a space stood before it, so that its first word has the
            entry that it has elsewhere.

    Raises:
        ValueError: `vocab_size` leaves no room for merges.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    minimum = len(alphabet) + len(special_tokens) + 1
    if vocab_size < minimum:
        raise ValueError(
            f"`vocab_size` must be at least {minimum}, for {len(alphabet)} bytes, special tokens and "
            f"merges (got {vocab_size})."
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special_tokens,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def load_model(
    auto_class: type,
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
        )
        # under DeepSpeed's ZeRO-3 each process holds a part of them
        count = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
        logger.info(f"A new {type(model).__name__} with {count:,} parameters.")
        return model
    config = {} if model_args.config_name is None else {"config": _named_config(model_args)}
    model = auto_class.from_pretrained(
        model_args.model_name_or_path, **config, **model_args.hub_kwargs()
    )
    if len(tokenizer) > model.get_input_embeddings().num_embeddings:
        model.resize_token_embeddings(len(tokenizer))
    return convert(model, gating_args)


def _named_config(model_args: ModelArguments) -> PreTrainedConfig:
    return AutoConfig.from_pretrained(model_args.config_name, **model_args.hub_kwargs())


def _new_config(
    model_args: ModelArguments, gating_args: GatingArguments, token_fields: dict
) -> PreTrainedConfig:
    """A config from scratch: what is given, under the names that its class has for the fields."""
    if model_args.config_name is None:
        default, known = AutoConfig.for_model(model_args.model_type), {}
    else:
        default = _named_config(model_args)
        known = default.to_dict()
    fields = {}
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


def train(trainer: Trainer, checkpoint: str | None) -> None:
    result = trainer.train(resume_from_checkpoint=checkpoint)
    metrics = {
        **result.metrics,
        "train_samples": len(trainer.train_dataset),
        "trainable_parameters": trainer.get_num_trainable_parameters(),
    }
    trainer.save_model()
    trainer.log_metrics("train", metrics)
    trainer.save_metrics("train", metrics)
    trainer.save_state()


def data_for_card(name: str | None, config: str | None = None) -> dict[str, Any]:
    """What a card is told of a data set of the Hub; nothing of files, or of a folder of them."""
    found = hub_name(name)
    return {} if found is None else {"dataset": found, "dataset_tags": found, "dataset_args": config}


def finish(trainer: Trainer, **card: Any) -> None:
    """Push the model with its card, or write the card beside it, with all that was measured."""
    if trainer.args.push_to_hub:
        trainer.push_to_hub(**card)
    elif trainer.args.do_train:
        trainer.create_model_card(**card)
