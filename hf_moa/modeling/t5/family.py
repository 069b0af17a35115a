"""What the gated T5 declares."""

from __future__ import annotations

from ..core.family import Family
from . import model
from .configuration import MoaT5Config
from .layout import T5Layout

T5 = Family(
    model_type="t5",
    title="T5",
    prefix="T5",
    config_class=MoaT5Config,
    models=model,
    tokenizer="T5Tokenizer",
    layout=T5Layout,
    own_tasks={
        "feature-extraction": "Model",
        "text2text-generation": "ForConditionalGeneration",
        "text-encoding": "EncoderModel",
    },
)
