"""Gated Transformers: mixtures of attention heads, sparse experts and compute budgets.

Importing the package registers its classes with transformers' `AutoConfig` and `AutoModel*`, and with
PEFT the FTG method and the models' default target modules. That takes seconds, so in the console command
`hf-moa` it waits until one of the names below is used.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .importance import importance
    from .modeling.bert.configuration import MoaBertConfig
    from .modeling.bert.model import (
        MoaBertForMaskedLM,
        MoaBertForMultipleChoice,
        MoaBertForQuestionAnswering,
        MoaBertForReplacedTokenDetection,
        MoaBertForSequenceClassification,
        MoaBertForTokenClassification,
        MoaBertModel,
        MoaBertPreTrainedModel,
    )
    from .modeling.cct.static_compact_cache import CompactStaticCache
    from .modeling.ftg.config import FTGConfig
    from .modeling.gpt2.configuration import MoaGPT2Config
    from .modeling.gpt2.model import (
        MoaGPT2ForQuestionAnswering,
        MoaGPT2ForSequenceClassification,
        MoaGPT2ForTokenClassification,
        MoaGPT2LMHeadModel,
        MoaGPT2Model,
        MoaGPT2PreTrainedModel,
    )
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
    from .upcycle import upcycle

__version__ = "0.2.0"

__all__ = [
    "CompactStaticCache",
    "FTGConfig",
    "MoaBertConfig",
    "MoaBertForMaskedLM",
    "MoaBertForMultipleChoice",
    "MoaBertForQuestionAnswering",
    "MoaBertForReplacedTokenDetection",
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
    "importance",
    "upcycle",
]

# Where a name comes from, by how it begins.
_MODULES = {
    "MoaBert": ".modeling.bert.model",
    "MoaGPT2": ".modeling.gpt2.model",
    "MoaT5": ".modeling.t5.model",
    "CompactStaticCache": ".modeling.cct.static_compact_cache",
    "FTGConfig": ".modeling.ftg.config",
    "importance": ".importance",
    "upcycle": ".upcycle",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import_module(".registration", __name__)
    module = next(module for start, module in _MODULES.items() if name.startswith(start))
    globals()[name] = value = getattr(import_module(module, __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if "hf_moa_cli" not in sys.modules:
    # at once, or an import of their modules would bind their names to those
    __getattr__("importance")
    __getattr__("upcycle")
