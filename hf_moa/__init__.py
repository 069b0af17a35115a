"""Gated Transformers: mixtures of attention heads, sparse experts and compute budgets.

Importing the package registers its classes with transformers' `AutoConfig` and `AutoModel*`, and their
default target modules with PEFT.
"""

import transformers as _transformers

from .modeling.bert import model as _bert
from .modeling.bert.configuration import MoaBertConfig
from .modeling.bert.model import (
    MoaBertForMaskedLM,
    MoaBertForMultipleChoice,
    MoaBertForQuestionAnswering,
    MoaBertForSequenceClassification,
    MoaBertForTokenClassification,
    MoaBertModel,
    MoaBertPreTrainedModel,
)
from .modeling.checkpoint_code import write_code as _write_code
from .modeling.ftg import model as _ftg  # noqa: F401 - PEFT then knows the method
from .modeling.ftg.config import FTGConfig
from .modeling.gpt2 import model as _gpt2
from .modeling.gpt2.configuration import MoaGPT2Config
from .modeling.gpt2.model import (
    MoaGPT2ForQuestionAnswering,
    MoaGPT2ForSequenceClassification,
    MoaGPT2ForTokenClassification,
    MoaGPT2LMHeadModel,
    MoaGPT2Model,
    MoaGPT2PreTrainedModel,
)
from .modeling.t5 import model as _t5
from .modeling.t5.configuration import MoaT5Config
from .modeling.t5.model import (
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
    config_class.write_code = _write_code
    for auto_name, model_name in config_class.auto_classes.items():
        model_class = getattr(modeling, model_name)
        getattr(_transformers, auto_name).register(config_class, model_class, exist_ok=True)
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
