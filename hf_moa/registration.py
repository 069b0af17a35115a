"""Makes the models known to transformers' auto classes, and to PEFT.

`import hf_moa` does this, and so imports every model: the auto classes take classes; names they take
only of transformers' own. It cannot wait until the auto classes are imported:
`transformers.modeling_layers` does that while the code of BERT, on which the gated BERT builds, is half
imported.
"""

from types import ModuleType

import transformers

from .modeling.bert import model as bert
from .modeling.bert.configuration import MoaBertConfig
from .modeling.checkpoint_code import write_code
from .modeling.config.gating import GatingConfig
from .modeling.gpt2 import model as gpt2
from .modeling.gpt2.configuration import MoaGPT2Config
from .modeling.t5 import model as t5
from .modeling.t5.configuration import MoaT5Config
from .peft_registration import register_with_peft


def _register(config_class: type[GatingConfig], models: ModuleType, tokenizer_class: type) -> None:
    """Make a family known to the auto classes, and its checkpoints carry its code."""
    transformers.AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
    config_class.write_code = write_code
    for auto_name, model_name in config_class.auto_classes.items():
        model_class = getattr(models, model_name)
        getattr(transformers, auto_name).register(config_class, model_class, exist_ok=True)
    transformers.AutoTokenizer.register(config_class, tokenizer_class, exist_ok=True)


_register(MoaBertConfig, bert, transformers.BertTokenizer)
_register(MoaGPT2Config, gpt2, transformers.GPT2Tokenizer)
_register(MoaT5Config, t5, transformers.T5Tokenizer)
register_with_peft()
