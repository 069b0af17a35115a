"""Training whole models: a step and its optimiser, of each mechanism and of transformers' own model."""

from collections.abc import Callable, Iterator

import torch
from masked_lm import add_gradients, masked_batch, training_step
from memory import peak_of, peak_table
from tables import Table
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

from hf_moa import MoaBertConfig, MoaBertForMaskedLM, MoaGPT2Config, MoaGPT2LMHeadModel
from hf_moa.timing import Measurement, compare

BERT = (BertForMaskedLM, BertConfig, MoaBertForMaskedLM, MoaBertConfig)
GPT2 = (GPT2LMHeadModel, GPT2Config, MoaGPT2LMHeadModel, MoaGPT2Config)
# sequences, tokens, and what the configuration has else than BERT-base and GPT-2
SIZES = {
    "cpu": {
        "BERT": (4, 128, {"num_hidden_layers": 2}),
        "GPT-2": (4, 128, {"n_layer": 2}),
    },
    "cuda": {"BERT": (32, 512, {}), "GPT-2": (16, 1024, {})},
}
MECHANISMS = {
    "MHA": {},
    "MAE": {"attention_type": "mae"},
    "MAE, F step": {"attention_type": "mae"},
    "MoA, 12 of 32": {"attention_type": "moa", "num_attention_experts": 32},
    "CCT": {"cct_budgets": [1, 0.5], "cct_sublayer_norm": False},
}
LARGE = {"cpu": 1024, "cuda": 8192}  # the product that says what a device can do


def measure(*, turns: int, dtype: torch.dtype, compiled: bool = False) -> Iterator[Table]:
    """Half precision is autocast, as the example scripts train. Memory is what a step allocates, without
    parameters and the optimiser's states. Compiled as `--torch_compile` of the scripts does."""
    device = torch.get_default_device().type
    peak = product_rate(device, dtype, turns)
    for family, (plain, plain_config, gated, config) in {"BERT": BERT, "GPT-2": GPT2}.items():
        batch, length, sizes = SIZES[device][family]
        inputs = draw(family, batch, length, config(**sizes).vocab_size)
        models = {plain.__name__: plain(plain_config(**sizes))}
        models |= {name: gated(config(**sizes, **fields)) for name, fields in MECHANISMS.items()}
        models["MAE, F step"].set_mae_phase("expert")
        torch._dynamo.reset()  # it compiles a class eight times at most
        steps = {name: with_optimizer(m, inputs, dtype, compiled) for name, m in models.items()}
        with FlopCounterMode(display=False) as counter:
            training_step(models[plain.__name__], inputs, dtype)()
        results = compare(steps, turns=turns, title=f"training {family}")
        rate = counter.get_total_flops() / (1e-3 * results[0].value)
        what = f"training {family}, {batch} x {length} tokens"
        peaks = {name: peak_of(step) for name, step in steps.items()}
        share = f"{rate / 1e12:.1f} TFLOP/s, {rate / peak:.0%} of a large product's"
        yield Table("training", f"{what}, a step ({plain.__name__} {share})", results)
        yield tokens_table(results, batch * length, f"{what}, tokens per second")
        yield peak_table(peaks, group="training", title=f"{what}, peak memory")


def draw(family: str, batch: int, length: int, vocab_size: int) -> dict[str, torch.Tensor]:
    if family == "BERT":
        return masked_batch(batch, length, vocab_size)
    ids = torch.randint(1, vocab_size, (batch, length))
    return {"input_ids": ids, "labels": ids}


def with_optimizer(
    model: nn.Module, inputs: dict[str, torch.Tensor], dtype: torch.dtype, compiled: bool
) -> Callable[[], None]:
    """Loss, gradients, their clipping and AdamW."""
    model.train()
    call = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def run():
        add_gradients(call, inputs, dtype)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return run


def product_rate(device: str, dtype: torch.dtype, turns: int) -> float:
    """Operations per second of a large product of matrices."""
    size = LARGE[device]
    a, b = torch.randn(2, size, size, dtype=dtype)
    (result,) = compare({"product": lambda: a @ b}, turns=turns, title="product")
    return 2 * size**3 / (1e-3 * result.value)


def tokens_table(results: list[Measurement], tokens: int, title: str) -> Table:
    rates = [
        Measurement(result.name, 1e3 * tokens / result.value, ratio=1 / result.ratio)
        for result in results
    ]
    return Table("training", title, rates, unit="tokens/s")
