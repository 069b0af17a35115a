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
AutoModel.register(MoaBertConfig, MoaBertModel, exist_ok=True)
AutoModelForMaskedLM.register(MoaBertConfig, MoaBertForMaskedLM, exist_ok=True)
AutoModelForMultipleChoice.register(MoaBertConfig, MoaBertForMultipleChoice, exist_ok=True)
AutoModelForQuestionAnswering.register(MoaBertConfig, MoaBertForQuestionAnswering, exist_ok=True)
AutoModelForSequenceClassification.register(
    MoaBertConfig, MoaBertForSequenceClassification, exist_ok=True
)
AutoModelForTokenClassification.register(MoaBertConfig, MoaBertForTokenClassification, exist_ok=True)

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
