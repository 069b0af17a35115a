"""What the gated GPT-2 declares."""

from __future__ import annotations

from ..core.family import Family
from . import model
from .configuration import MoaGPT2Config
from .layout import Gpt2Layout

GPT2 = Family(
    model_type="gpt2",
    title="GPT-2",
    prefix="GPT2",
    config_class=MoaGPT2Config,
    models=model,
    tokenizer="GPT2Tokenizer",
    layout=Gpt2Layout,
    own_tasks={"feature-extraction": "Model", "text-generation": "LMHeadModel"},
)
