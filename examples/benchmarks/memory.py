"""Peak memory of a training step, relative to the plain backbone."""

from collections.abc import Callable, Iterator

import torch
from tables import Table
from torch import nn
from torch.profiler import profile
from transformers import BertConfig, BertModel, GPT2Config, GPT2Model, T5Config, T5Model

from hf_moa import (
    MoaBertConfig,
    MoaBertModel,
    MoaGPT2Config,
    MoaGPT2Model,
    MoaT5Config,
    MoaT5Model,
)
from hf_moa.timing import Measurement

BATCH, LENGTH = 8, 512
SIZES = {  # d=512, 8 heads, 3 layers
    "BERT": {"hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 2048,
             "num_hidden_layers": 3},
    "GPT-2": {"n_embd": 512, "n_head": 8, "n_layer": 3, "bos_token_id": 0, "eos_token_id": 0},
    "T5": {"d_model": 512, "num_heads": 8, "d_kv": 64, "d_ff": 2048, "num_layers": 3},
}  # fmt: skip
CLASSES = {
    "BERT": (BertModel, BertConfig, MoaBertModel, MoaBertConfig),
    "GPT-2": (GPT2Model, GPT2Config, MoaGPT2Model, MoaGPT2Config),
    "T5": (T5Model, T5Config, MoaT5Model, MoaT5Config),
}
MECHANISMS = {
    "MAE": {"attention_type": "mae"},
    "MoA, N=16": {"attention_type": "moa", "num_attention_experts": 16},
    "CCT": {"cct_budgets": [1, 0.5], "cct_sublayer_norm": False},
    "CCT with the paper's norms": {"cct_budgets": [1, 0.5]},
}


def measure(*, turns: int, dtype: torch.dtype) -> Iterator[Table]:
    """Parameters, gradients and what backward needs, without an optimiser; half precision is autocast.
    The same at every turn: one is enough."""
    for family, (plain, plain_config, gated, config) in CLASSES.items():
        sizes = SIZES[family] | {"vocab_size": 1000}
        peaks = {family: peak_of_training(plain(plain_config(**sizes)), dtype)}
        for name, fields in MECHANISMS.items():
            peaks[name] = peak_of_training(gated(config(**sizes, **fields)), dtype)
        title = f"Peak memory of a training step, {family}, batch {BATCH}, {LENGTH} tokens"
        yield peak_table(peaks, group="memory", title=title)


def peak_of_training(model: nn.Module, dtype: torch.dtype) -> int:
    """Bytes at the peak of forward and backward, the parameters included."""
    model.train()
    ids = torch.randint(1, 1000, (BATCH, LENGTH))
    inputs = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}

    def step():
        model.zero_grad(set_to_none=True)
        with torch.autocast(ids.device.type, dtype, enabled=dtype != torch.float32):
            output = model(ids, **inputs)
        loss = output[0].float().mean()
        aux_loss = output.get("aux_loss")
        (loss if aux_loss is None else loss + aux_loss).backward()

    step()
    model.zero_grad(set_to_none=True)
    return peak_of(step) + sum(parameter.nbytes for parameter in model.parameters())


def peak_table(peaks: dict[str, int], *, group: str, title: str) -> Table:
    """Peaks in bytes as megabytes, and relative to the first."""
    first = next(iter(peaks.values()))
    results = [Measurement(name, peak / 1e6, ratio=peak / first) for name, peak in peaks.items()]
    return Table(group, title, results, unit="MB")


def peak_of(function: Callable[[], object]) -> int:
    """The most bytes that a call has allocated at once, those of its own operators' workspaces
    included."""
    if torch.get_default_device().type == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        function()
        return torch.cuda.max_memory_allocated() - before
    with profile(profile_memory=True) as profiler:
        function()
    events = [
        (event.start_ns(), event.nbytes())
        for event in profiler.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    held = peak = 0
    for _, amount in sorted(events, key=lambda event: event[0]):
        held += amount
        peak = max(peak, held)
    return peak
