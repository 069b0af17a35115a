"""Models with FTG adapters, on every backbone and kind of gate."""

import peft
import pytest
import torch
from packaging.version import Version
from peft import get_peft_model
from training_runs import CLASSES, build
from transformers.integrations.peft import MIN_PEFT_VERSION

from hf_moa import FTGConfig

VARIANTS = {
    "mae": {"attention_type": "mae"},
    "moa": {"attention_type": "moa", "router_type": "noisy_topk", "ffn_type": "moe"},
    "cct": {"cct_budgets": [1, 0.5]},
    "mae-cct": {"attention_type": "mae", "cct_budgets": [1, 0.5]},
}
TASKS = {"bert": "SEQ_CLS", "bert-lm": None, "gpt2": "CAUSAL_LM", "t5": "SEQ_2_SEQ_LM"}
each_backbone = pytest.mark.parametrize("name", ["bert", "gpt2", "t5"])
each_variant = pytest.mark.parametrize("variant", VARIANTS)
needs_peft_of_transformers = pytest.mark.skipif(
    Version(peft.__version__) < Version(MIN_PEFT_VERSION),
    reason=f"this version of transformers works with PEFT from {MIN_PEFT_VERSION} on",
)
each_method = pytest.mark.parametrize("plus", [False, True], ids=["ftg", "ftg-plus"])


def adapted(name, variant, *, plus=False, seed=0, adapter_name="default", perturbed=False, **config):
    base = build(name, dropout=True, seed=seed, **VARIANTS[variant])
    config = FTGConfig(plus=plus, task_type=TASKS[name], init_weights=not perturbed, **config)
    return get_peft_model(base, config, adapter_name=adapter_name)


@torch.no_grad()
def predict(name, model):
    return model(**CLASSES[name].inputs())[0]


def tensors(model):
    return dict([*model.named_parameters(), *model.named_buffers()])
