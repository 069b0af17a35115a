"""What the commands share."""

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def add_command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], summary: str, example: str
) -> argparse.ArgumentParser:
    """A command's parser, whose help ends with an example.

    Args:
        commands: what `add_subparsers` returned.
        run: carries the command out and returns the exit code.
    """
    parser = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=f"example: {example}",
    )
    parser.set_defaults(run=run)
    return parser


def given(args: argparse.Namespace, kind: type) -> dict[str, Any]:
    """Those arguments that were given and are fields of the dataclass `kind`."""
    names = {field.name for field in dataclasses.fields(kind)}
    return {name: value for name, value in vars(args).items() if name in names}


def budget(text: str) -> float | tuple[float, ...]:
    """`0.5`, or for T5 a pair of encoder and decoder, `1,0.5`."""
    numbers = tuple(float(number) for number in text.split(","))
    return numbers if len(numbers) > 1 else numbers[0]


@contextmanager
def without_bars() -> Iterator[None]:
    """Loading and saving take seconds, and an error is to be the only line."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def tokenizer_of(source: str, subfolder: str = "") -> Any:
    """The tokenizer beside a checkpoint; None where there is none."""
    from transformers import AutoTokenizer
    from transformers.utils import cached_file

    # AutoTokenizer makes an empty tokenizer of a folder without files for one.
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        found: bool | str | None
        if Path(source).is_dir():
            found = (Path(source) / subfolder / name).is_file()
        else:
            found = cached_file(
                source, name, subfolder=subfolder, _raise_exceptions_for_missing_entries=False
            )
        if found:
            return AutoTokenizer.from_pretrained(source, subfolder=subfolder)
    return None


def move(model: Any, device: str | None, **kwargs: Any) -> None:
    """`model.to`, where a device that is not there is the user's mistake.

    Raises:
        ValueError: there is no such device.
    """
    try:
        model.to(device=device, **kwargs)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device must be one of this machine's (got {device}: {error})") from error


def load_checkpoint(source: str, *, budgets: Sequence[Any] | None = None) -> Any:
    """A gated model, or an adapter on one, in eval mode; of the class that the checkpoint names.

    Args:
        source: folder or Hub id.
        budgets: that it has to have, which its configuration tells before its weights are loaded.

    Raises:
        ValueError: a checkpoint of another package's class, or without these budgets; an adapter that
            names no base.
        OSError: there is none.
    """
    from hf_moa.hub_names import check_source

    check_source(source)
    config = _file_of(source, "adapter_config.json")
    if config is None:
        return _load_model(source, budgets=budgets or ())
    return _load_adapter(source, config, budgets or ())


def _load_adapter(source: str, path: Path, budgets: Sequence[Any]) -> Any:
    from peft import PeftModel

    from hf_moa.adapter_files import BASE_FOLDER, base_class_of, names_base_folder
    from hf_moa.modeling.ftg.config import saved_num_labels

    facts = json.loads(path.read_text(encoding="utf-8"))
    base = facts.get("base_model_name_or_path")
    if not base:
        raise ValueError(
            f"{source} must name its base model (got no base_model_name_or_path in "
            "adapter_config.json); save the base, and write its folder there"
        )
    weights = _file_of(source, "adapter_model.safetensors")
    labels = None if weights is None else saved_num_labels(weights.parent)
    options: dict[str, Any] = {} if labels is None else {"num_labels": labels}
    # as `base_beside` has it of a folder; on the Hub there are only files
    if names_base_folder(base) and _file_of(source, f"{BASE_FOLDER}/config.json"):
        base, options["subfolder"] = source, BASE_FOLDER
    model = _load_model(base, lambda config: base_class_of(facts, config), budgets=budgets, **options)
    return PeftModel.from_pretrained(model, source).eval()


def _load_model(
    source: str,
    class_of: Callable[[Any], str | None] = lambda config: None,
    *,
    budgets: Sequence[Any] = (),
    **options: Any,
) -> Any:
    """A gated model, in eval mode.

    Args:
        class_of: its configuration -> the name of its class; None: what the checkpoint names.
        budgets: see `load_checkpoint`.
        options: fields of the configuration, or `subfolder`.
    """
    from transformers import AutoConfig

    import hf_moa.registration
    from hf_moa.modeling.config.gating import GatingConfig

    config: PreTrainedConfig = AutoConfig.from_pretrained(source, subfolder=options.get("subfolder", ""))
    if not isinstance(config, GatingConfig):
        raise ValueError(
            f"{source} must be a checkpoint of hf_moa (got model_type {config.model_type!r}); `hf-moa "
            "upcycle` makes one of a BERT, GPT-2 or T5"
        )
    name = class_of(config) or next(iter(config.architectures or []), None)
    model_class = getattr(hf_moa, name or "", None)
    if model_class is None:
        raise ValueError(f"{source} must name a class of hf_moa in `architectures` (got {name!r})")
    _check_budgets(config, budgets, source)
    return model_class.from_pretrained(source, **options).eval()


def _check_budgets(config: Any, budgets: Sequence[Any], source: str) -> None:
    known = config.listed_budgets
    # T5 takes all pairs of listed numbers, and of a listed pair's equal numbers the one
    numbers = {b for b in known if not isinstance(b, tuple)}
    for budget in budgets:
        pair = budget if isinstance(budget, tuple) else (budget, budget)
        has_pairs = config.is_encoder_decoder and (pair in known or numbers.issuperset(pair))
        if budget not in known and not has_pairs:
            raise ValueError(
                f"--budgets must be of those of {source}, {', '.join(map(str, known)) or 'none'} (got "
                f"{budget})"
            )


def _file_of(source: str, name: str) -> Path | None:
    """A file of a checkpoint; None where it has none of that name."""
    from transformers.utils import cached_file

    quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_gated_repo": False}
    path = cached_file(source, name, **quiet)
    return None if path is None else Path(path)
