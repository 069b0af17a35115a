"""Training masked language models: what `sparse_prediction` saves."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from memory import peak_of, peak_table
from tables import Table
from torch import nn
from transformers import BertConfig, BertForMaskedLM

from hf_moa import MoaBertConfig, MoaBertForMaskedLM
from hf_moa.timing import compare

BATCH, LENGTH, LABELLED = 8, 128, 0.15
SIZES = ((384, 12, 6), (768, 12, 12))  # d, h, layers


def measure(*, turns: int, dtype: torch.dtype) -> Iterator[Table]:
    """Forward and backward of models with BERT's 30,522 words; half precision is autocast. Memory is
    what a step allocates, without the parameters."""
    batch = masked_batch(BATCH, LENGTH, BertConfig().vocab_size)
    for hidden_size, heads, layers in SIZES:
        sizes = {
            "hidden_size": hidden_size,
            "num_attention_heads": heads,
            "num_hidden_layers": layers,
            "intermediate_size": 4 * hidden_size,
        }
        steps = {
            name: training_step(model, batch, dtype)
            for name, model in {
                "BertForMaskedLM": BertForMaskedLM(BertConfig(**sizes)),
                "MHA": MoaBertForMaskedLM(MoaBertConfig(**sizes)),
                "MHA, sparse prediction": MoaBertForMaskedLM(
                    MoaBertConfig(sparse_prediction=True, **sizes)
                ),
            }.items()
        }
        what = f"training, batch {BATCH}, {LENGTH} tokens, {layers} layers, d={hidden_size}"
        yield Table(
            group="masked_lm",
            title=f"Masked language model, {what}",
            results=compare(steps, turns=turns, title=f"masked_lm d={hidden_size}"),
        )
        peaks = {name: peak_of(step) for name, step in steps.items()}
        title = f"Masked language model, peak memory, {what}"
        yield peak_table(peaks, group="masked_lm", title=title)


def masked_batch(batch: int, length: int, vocab_size: int) -> dict[str, torch.Tensor]:
    """Words at random, some of them to be found."""
    ids = torch.randint(1, vocab_size, (batch, length))
    return {"input_ids": ids, "labels": ids.masked_fill(torch.rand(ids.shape) > LABELLED, -100)}


def training_step(
    model: nn.Module, batch: dict[str, torch.Tensor], dtype: torch.dtype
) -> Callable[[], None]:
    """Loss and gradients, without an optimiser."""
    model.train()

    def run():
        add_gradients(model, batch, dtype)
        model.zero_grad(set_to_none=True)

    return run


def add_gradients(model: Callable[..., Any], batch: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    """Of the loss; half precision is autocast."""
    with torch.autocast(batch["input_ids"].device.type, dtype, enabled=dtype != torch.float32):
        loss = model(**batch).loss
    loss.backward()
