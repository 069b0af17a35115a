"""What `upcycle` knows of each backbone: its classes, its tasks, and where its weights are."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

from transformers import PreTrainedConfig, PreTrainedModel

from hf_moa.modeling.bert import model as modeling_moa_bert
from hf_moa.modeling.bert.configuration import MoaBertConfig
from hf_moa.modeling.gpt2 import model as modeling_moa_gpt2
from hf_moa.modeling.gpt2.configuration import MoaGPT2Config
from hf_moa.modeling.t5 import model as modeling_moa_t5
from hf_moa.modeling.t5.configuration import MoaT5Config

from .bert import BertLayout
from .gpt2 import Gpt2Layout
from .t5 import T5Layout
from .weights import Layout


@dataclass(frozen=True)
class Family:
    """A backbone that can be upcycled.

    Attributes:
        model_type: of the source's configuration.
        config_class: the gated configuration.
        modeling: the module of the gated classes.
        tasks: task -> the source's class, by name. The values are all classes there are.
        layout: where it has a layer's weights.
        extra_fields: configuration fields that may be set beside the gating ones.
        aliases: a class without a gated one -> the class that stands for it, and the prefixes of the
            weights which that one has no use for.
    """

    model_type: str
    config_class: type[PreTrainedConfig]
    modeling: ModuleType
    tasks: dict[str, str]
    layout: type[Layout]
    extra_fields: tuple[str, ...]
    aliases: dict[str, tuple[str, tuple[str, ...]]]

    def gated_class(self, name: str) -> type[PreTrainedModel]:
        """The gated class of a plain one, `BertModel` -> `MoaBertModel`."""
        return getattr(self.modeling, f"Moa{name}")


_SHARED_TASKS = {
    "text-classification": "ForSequenceClassification",
    "token-classification": "ForTokenClassification",
    "question-answering": "ForQuestionAnswering",
}


def _tasks(prefix: str, **others: str) -> dict[str, str]:
    named = {name.replace("_", "-"): suffix for name, suffix in others.items()}
    return {task: prefix + suffix for task, suffix in (named | _SHARED_TASKS).items()}


FAMILIES = (
    Family(
        model_type="bert",
        config_class=MoaBertConfig,
        modeling=modeling_moa_bert,
        tasks=_tasks(
            "Bert",
            feature_extraction="Model",
            fill_mask="ForMaskedLM",
            multiple_choice="ForMultipleChoice",
        ),
        layout=BertLayout,
        extra_fields=("num_attention_heads", "head_dim", "pre_norm", "sparse_prediction"),
        # Pretraining checkpoints hold a masked language model; their next-sentence head has no use here.
        aliases={
            "BertForPreTraining": ("BertForMaskedLM", ("bert.pooler.", "cls.seq_relationship.")),
        },
    ),
    Family(
        model_type="gpt2",
        config_class=MoaGPT2Config,
        modeling=modeling_moa_gpt2,
        tasks=_tasks("GPT2", feature_extraction="Model", text_generation="LMHeadModel"),
        layout=Gpt2Layout,
        extra_fields=("num_attention_heads", "head_dim"),
        aliases={},
    ),
    Family(
        model_type="t5",
        config_class=MoaT5Config,
        modeling=modeling_moa_t5,
        tasks=_tasks(
            "T5",
            feature_extraction="Model",
            text2text_generation="ForConditionalGeneration",
            text_encoding="EncoderModel",
        ),
        layout=T5Layout,
        extra_fields=("num_attention_heads", "head_dim"),
        aliases={},
    ),
)
TASKS = tuple(dict.fromkeys(task for family in FAMILIES for task in family.tasks))


def family_of(config: PreTrainedConfig) -> Family:
    """The family of a source.

    Raises:
        ValueError: there is none.
    """
    for family in FAMILIES:
        if config.model_type in (family.model_type, family.config_class.model_type):
            return family
    known = ", ".join(repr(family.model_type) for family in FAMILIES)
    raise ValueError(f"upcycle takes models of type {known} (got {config.model_type!r}).")
