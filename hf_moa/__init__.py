"""Gated Transformers: mixtures of attention heads, sparse experts and compute budgets.

Importing the package registers its classes with transformers' `AutoConfig` and `AutoModel*`, and their
default target modules with PEFT.
"""

import transformers as _transformers

from .modeling import modeling_moa_bert as _bert
from .modeling import modeling_moa_gpt2 as _gpt2
from .modeling import modeling_moa_t5 as _t5
from .modeling.configuration_moa_bert import MoaBertConfig
from .modeling.configuration_moa_gpt2 import MoaGPT2Config
from .modeling.configuration_moa_t5 import MoaT5Config
from .modeling.ftg_config import FTGConfig
from .modeling.modeling_moa_bert import (
    MoaBertForMaskedLM,
    MoaBertForMultipleChoice,
    MoaBertForQuestionAnswering,
    MoaBertForSequenceClassification,
    MoaBertForTokenClassification,
    MoaBertModel,
    MoaBertPreTrainedModel,
)
from .modeling.modeling_moa_gpt2 import (
    MoaGPT2ForQuestionAnswering,
    MoaGPT2ForSequenceClassification,
    MoaGPT2ForTokenClassification,
    MoaGPT2LMHeadModel,
    MoaGPT2Model,
    MoaGPT2PreTrainedModel,
)
from .modeling.modeling_moa_t5 import (
    MoaT5EncoderModel,
    MoaT5ForConditionalGeneration,
    MoaT5ForQuestionAnswering,
    MoaT5ForSequenceClassification,
    MoaT5ForTokenClassification,
    MoaT5Model,
    MoaT5PreTrainedModel,
)
from .peft_targets import register_target_modules as _register_target_modules
from .upcycle import upcycle

__version__ = "0.1.0"


def _register(config_class, modeling, tokenizer_class) -> None:
    """Make a family known to the auto classes and to PEFT, and its checkpoints carry its code."""
    _transformers.AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
    config_class.register_for_auto_class()
    for auto_name, model_name in config_class.auto_classes.items():
        model_class = getattr(modeling, model_name)
        getattr(_transformers, auto_name).register(config_class, model_class, exist_ok=True)
        model_class.register_for_auto_class(auto_name)
    _transformers.AutoTokenizer.register(config_class, tokenizer_class, exist_ok=True)
    backbone = config_class.model_type.removeprefix("moa_")
    _register_target_modules(config_class.model_type, backbone)


_register(MoaBertConfig, _bert, _transformers.BertTokenizer)
_register(MoaGPT2Config, _gpt2, _transformers.GPT2Tokenizer)
_register(MoaT5Config, _t5, _transformers.T5Tokenizer)

__all__ = [
    "FTGConfig",
    "MoaBertConfig",
    "MoaBertForMaskedLM",
    "MoaBertForMultipleChoice",
    "MoaBertForQuestionAnswering",
    "MoaBertForSequenceClassification",
    "MoaBertForTokenClassification",
    "MoaBertModel",
    "MoaBertPreTrainedModel",
    "MoaGPT2Config",
    "MoaGPT2ForQuestionAnswering",
    "MoaGPT2ForSequenceClassification",
    "MoaGPT2ForTokenClassification",
    "MoaGPT2LMHeadModel",
    "MoaGPT2Model",
    "MoaGPT2PreTrainedModel",
    "MoaT5Config",
    "MoaT5EncoderModel",
    "MoaT5ForConditionalGeneration",
    "MoaT5ForQuestionAnswering",
    "MoaT5ForSequenceClassification",
    "MoaT5ForTokenClassification",
    "MoaT5Model",
    "MoaT5PreTrainedModel",
    "upcycle",
]
