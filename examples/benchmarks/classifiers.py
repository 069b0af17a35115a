"""Sequence classifiers: what the last layer saves by computing the classifier's token only."""

from collections.abc import Iterator
from functools import partial

import torch
from layers import forward
from tables import Table
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
)

from hf_moa import (
    MoaBertConfig,
    MoaBertForSequenceClassification,
    MoaGPT2Config,
    MoaGPT2ForSequenceClassification,
)
from hf_moa.timing import compare

SIZES = {"cpu": ((384, 12), (768, 12)), "cuda": ((768, 12),)}  # d, h
BATCHES = {"cpu": (1, 32), "cuda": (32, 256)}
LAYERS = (6, 3, 2)
LENGTH = 64


def bert(hidden_size: int, heads: int, layers: int) -> dict[str, int]:
    return {
        "hidden_size": hidden_size,
        "num_attention_heads": heads,
        "intermediate_size": 4 * hidden_size,
        "num_hidden_layers": layers,
        "vocab_size": 1000,
    }


def gpt2(hidden_size: int, heads: int, layers: int) -> dict[str, int]:
    sizes = {"n_embd": hidden_size, "n_head": heads, "n_layer": layers, "vocab_size": 1000}
    return sizes | {"pad_token_id": 0}


FAMILIES = {
    "BERT": (
        bert,
        (BertForSequenceClassification, BertConfig),
        (MoaBertForSequenceClassification, MoaBertConfig),
    ),
    "GPT-2": (
        gpt2,
        (GPT2ForSequenceClassification, GPT2Config),
        (MoaGPT2ForSequenceClassification, MoaGPT2Config),
    ),
}
NESTED = {"nested_budgets": [1, 0.5, 0.33]}


def measure(*, turns: int, dtype: torch.dtype) -> Iterator[Table]:
    """64 tokens. To the time of transformers' classifier."""
    device = torch.get_default_device().type
    for name, (sizes_of, (plain_class, plain_config), (gated_class, gated_config)) in FAMILIES.items():
        for hidden_size, heads in SIZES[device]:
            for layers in LAYERS:
                sizes = sizes_of(hidden_size, heads, layers)
                plain = plain_class(plain_config(**sizes)).to(dtype)
                gated = gated_class(gated_config(**sizes)).to(dtype)
                for batch in BATCHES[device]:
                    ids = torch.randint(1, 1000, (batch, LENGTH))
                    run = partial(forward, use_cache=False) if name == "GPT-2" else forward
                    candidates = {
                        "transformers": run(plain, ids),
                        "plain, all tokens": run(gated, ids, output_hidden_states=True),
                        "plain, one token": run(gated, ids),
                    }
                    if layers == max(LAYERS):
                        nested = gated_class(gated_config(**sizes, **NESTED)).to(dtype)
                        candidates |= {
                            f"nested, {budget}": run(nested, ids, budget=budget)
                            for budget in nested.config.nested_budgets
                        }
                    title = f"{name}'s classifier, {layers} layers, batch {batch}, d={hidden_size}"
                    yield Table("classifiers", title, compare(candidates, turns=turns, title=title))
