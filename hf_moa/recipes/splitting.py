"""Over how many processes a script's model is split: flags, and the split model."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig


@dataclass
class SplitArguments:
    """Over how many processes the model is split, by transformers' engine."""

    tp_size: int = field(
        default=1,
        metadata={"help": "Processes that share each layer's heads and neurons (tensor parallelism)."},
    )
    ep_size: int = field(
        default=1,
        metadata={"help": "Processes that share the feed-forward experts (expert parallelism)."},
    )
    fsdp_size: int = field(
        default=1, metadata={"help": "Processes that shard the model's layers (FSDP version 2)."}
    )
    dp_replicate_size: int = field(
        default=1, metadata={"help": "Copies of what `fsdp_size` processes shard (HSDP)."}
    )

    @property
    def is_split(self) -> bool:
        return bool(self.given)

    @property
    def given(self) -> list[str]:
        """The flags that split it."""
        names = [each.name for each in fields(SplitArguments)]
        return [f"{name}={getattr(self, name)}" for name in names if getattr(self, name) != 1]

    def check(self, adapter: str) -> None:
        """Check what goes with a model that is split.

        Args:
            adapter: what of the model is to be trained; see `AdapterArguments`.

        Raises:
            ValueError: an adapter.
        """
        if self.is_split and adapter != "none":
            raise ValueError(
                "`adapter` must be none for a model that is split over processes (got "
                f"{adapter}): leave out {', '.join(self.given)}."
            )


def split_model(model: PreTrainedModel, sizes: SplitArguments) -> PreTrainedModel:
    """The model over processes; itself where it is not to be split. Each process has the whole model
    until then.

    Raises:
        ValueError: it cannot be split so.
        RuntimeError: there are not as many processes.
    """
    if not sizes.is_split:
        return model
    parts = type(model).from_pretrained(
        None,
        config=model.config,
        state_dict=model.state_dict(),
        distributed_config=DistributedConfig(
            **{each.name: getattr(sizes, each.name) for each in fields(SplitArguments)}
        ),
    )
    if model.can_generate():
        parts.generation_config = model.generation_config
    return parts.train(model.training)
