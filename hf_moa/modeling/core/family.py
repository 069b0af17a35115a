"""What a backbone declares of itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from transformers import PreTrainedModel

# Heads that every family has, by the names of their tasks.
_SHARED_TASKS = {
    "text-classification": "ForSequenceClassification",
    "token-classification": "ForTokenClassification",
    "question-answering": "ForQuestionAnswering",
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """A backbone: transformers' own, and its gated classes, whose names begin with "Moa".

    Args:
        model_type: of transformers' configuration, such as "bert".
        title: as people write it, such as "BERT".
        prefix: of its classes' names, such as "Bert".
        config_class: the gated configuration.
        models: the module of the gated classes.
        tokenizer: the class of transformers' tokenizer, by name.
        layout: where the weights of transformers' models are, a `Layout`.
        own_tasks: its heads beside those that all families have: task -> what the class is called behind
            the prefix.
        extra_fields: configuration fields that `upcycle` takes beside the gating ones.
        tasks_of_relatives: those of them that transformers has no class of this prefix for.
        aliases: a class without a gated one -> the class that stands for it, and the prefixes of the
            weights which that one has no use for.
    """

    model_type: str
    title: str
    prefix: str
    config_class: type[Any]
    models: ModuleType
    tokenizer: str
    layout: type[Any]
    own_tasks: dict[str, str]
    extra_fields: tuple[str, ...] = ("num_attention_heads", "head_dim")
    tasks_of_relatives: tuple[str, ...] = ()
    aliases: dict[str, tuple[str, tuple[str, ...]]] = field(default_factory=dict)

    @property
    def tasks(self) -> dict[str, str]:
        """Task -> transformers' class, by name. The values are all classes there are."""
        return {task: self.prefix + name for task, name in (self.own_tasks | _SHARED_TASKS).items()}

    def gated_class(self, name: str) -> type[PreTrainedModel]:
        """The gated class of a plain one, `BertModel` -> `MoaBertModel`."""
        return getattr(self.models, f"Moa{name}")
