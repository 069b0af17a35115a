"""What the gated Llama declares."""

from hf_moa.modeling.core.family import Family

from . import model
from .configuration import MoaLlamaConfig
from .layout import LlamaLayout

LLAMA = Family(
    model_type="llama",
    title="Llama",
    prefix="Llama",
    config_class=MoaLlamaConfig,
    models=model,
    tokenizer="PreTrainedTokenizerFast",
    layout=LlamaLayout,
    own_tasks={"feature-extraction": "Model", "text-generation": "ForCausalLM"},
)
