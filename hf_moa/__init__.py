"""Gated Transformers: mixtures of attention heads, sparse experts and compute budgets.

Importing the package registers its classes with transformers' `AutoConfig` and `AutoModel*`.
"""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForMultipleChoice,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    BertTokenizer,
)

from .modeling.configuration_moa_bert import MoaBertConfig
from .modeling.modeling_moa_bert import (
    MoaBertForMaskedLM,
    MoaBertForMultipleChoice,
    MoaBertForQuestionAnswering,
    MoaBertForSequenceClassification,
    MoaBertForTokenClassification,
    MoaBertModel,
    MoaBertPreTrainedModel,
)
from .upcycle import upcycle

__version__ = "0.1.0"

AutoConfig.register("moa_bert", MoaBertConfig, exist_ok=True)
for _auto, _model in (
    (AutoModel, MoaBertModel),
    (AutoModelForMaskedLM, MoaBertForMaskedLM),
    (AutoModelForMultipleChoice, MoaBertForMultipleChoice),
    (AutoModelForQuestionAnswering, MoaBertForQuestionAnswering),
    (AutoModelForSequenceClassification, MoaBertForSequenceClassification),
    (AutoModelForTokenClassification, MoaBertForTokenClassification),
):
    _auto.register(MoaBertConfig, _model, exist_ok=True)

AutoTokenizer.register(MoaBertConfig, BertTokenizer, exist_ok=True)

__all__ = [
    "MoaBertConfig",
    "MoaBertForMaskedLM",
    "MoaBertForMultipleChoice",
    "MoaBertForQuestionAnswering",
    "MoaBertForSequenceClassification",
    "MoaBertForTokenClassification",
    "MoaBertModel",
    "MoaBertPreTrainedModel",
    "upcycle",
]
