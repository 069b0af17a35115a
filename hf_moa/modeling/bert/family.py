"""What the gated BERT declares."""

from __future__ import annotations

from ..core.family import Family
from . import model
from .configuration import MoaBertConfig
from .layout import BertLayout

BERT = Family(
    model_type="bert",
    title="BERT",
    prefix="Bert",
    config_class=MoaBertConfig,
    models=model,
    tokenizer="BertTokenizer",
    layout=BertLayout,
    own_tasks={
        "feature-extraction": "Model",
        "fill-mask": "ForMaskedLM",
        "multiple-choice": "ForMultipleChoice",
        "replaced-token-detection": "ForReplacedTokenDetection",
    },
    tasks_of_relatives=("replaced-token-detection",),
    extra_fields=("num_attention_heads", "head_dim", "pre_norm", "sparse_prediction"),
    # Pretraining checkpoints hold a masked language model; their next-sentence head has no use here.
    aliases={"BertForPreTraining": ("BertForMaskedLM", ("bert.pooler.", "cls.seq_relationship."))},
)
