"""Decoding: what MAE's gates cost a step of GPT-2, and what CCT saves a step and its cache."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from cct import run_gated
from layers import forward
from tables import Table
from torch import nn
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel

from hf_moa import MoaGPT2Config, MoaGPT2LMHeadModel
from hf_moa.timing import Measurement, compare

MAE_SIZES = ((384, 12), (512, 8), (768, 12))  # d, h
CCT_SIZE = (512, 8)
BATCHES = (1, 4)
SHARES = (1.0, 0.5, 0.33, 0.1)
MAE_PAST, CCT_PAST = 128, 512  # tokens in the cache
SMALL_SIZES, SMALL_PAST = (128, 256, 512), 128
SMALL_BATCHES, SMALL_SHARES = (1, 2, 4, 16), (1.0, 0.5, 0.2)
STEPS_IN_A_TURN = 4


def measure_mae(*, turns: int, dtype: torch.dtype) -> Iterator[Table]:
    """GPT-2's own size, and models of 6 layers; a step is one token, behind those in the cache."""
    yield mae_table(
        GPT2LMHeadModel(GPT2Config()),
        MoaGPT2LMHeadModel(MoaGPT2Config(attention_type="mae")),
        title="GPT-2's size",
        turns=turns,
        dtype=dtype,
    )
    for hidden_size, heads in MAE_SIZES:
        pair = plain(hidden_size, heads), gated(hidden_size, heads, "mae")
        yield mae_table(*pair, title=f"d={hidden_size}", turns=turns, dtype=dtype)


def mae_table(
    reference: nn.Module, model: nn.Module, *, title: str, turns: int, dtype: torch.dtype
) -> Table:
    candidates = {
        name: decoding_steps(each.to(dtype), batch=1, past=MAE_PAST)
        for name, each in {"GPT-2": reference, "MAE": model}.items()
    }
    return Table(
        group="mae_decoding",
        title=f"MAE, a decoding step behind {MAE_PAST} tokens, {title}",
        results=compare_steps(candidates, turns=turns),
    )


def measure_cct(*, turns: int, dtype: torch.dtype) -> Iterator[Table]:
    """6 layers; a step is one token for each sequence, behind those in the cache."""
    fields = {"cct_budgets": [1, 0.5], "cct_sublayer_norm": False}
    models = plain(*CCT_SIZE).to(dtype), gated(*CCT_SIZE, "mha", **fields).to(dtype)
    for batch in BATCHES:
        for share in SHARES:
            yield from cct_tables(*models, batch=batch, share=share, turns=turns)


def measure_small_cct(*, turns: int, dtype: torch.dtype) -> Iterator[Table]:
    """What "auto" takes where skipping saves little or nothing, against the dense form: 3 layers."""
    fields = {"cct_budgets": [1, 0.5], "cct_sublayer_norm": False, "n_layer": 3}
    for hidden_size in SMALL_SIZES:
        model = gated(hidden_size, 8, "mha", **fields).to(dtype)
        for batch in SMALL_BATCHES:
            for share in SMALL_SHARES:
                candidates = {
                    f"CCT, {execution}": with_gates(
                        decoding_steps, model, execution, share, batch=batch, past=SMALL_PAST
                    )
                    for execution in ("dense", "sparse", "auto")
                }
                about = f"{share:.0%} of the gates open, batch {batch}, d={hidden_size}"
                yield Table(
                    group="small_cct_decoding",
                    title=f"CCT, a decoding step behind {SMALL_PAST} tokens, {about}",
                    results=compare_steps(candidates, turns=turns),
                )


def cct_tables(
    reference: nn.Module, model: nn.Module, *, batch: int, share: float, turns: int
) -> Iterator[Table]:
    """A step, the prompt before it, and the cache in between."""
    size = {"batch": batch, "past": CCT_PAST}
    about = f"{share:.0%} of the gates open, batch {batch}, d={CCT_SIZE[0]}"
    for what, make, measure_times in (
        ("a decoding step behind", decoding_steps, compare_steps),
        ("a prompt of", prompt, compare),
    ):
        candidates = {"GPT-2": make(reference, **size)}
        for execution in ("dense", "auto"):
            candidates[f"CCT, {execution}"] = with_gates(make, model, execution, share, **size)
        yield Table(
            group="cct_decoding",
            title=f"CCT, {what} {CCT_PAST} tokens, {about}",
            results=measure_times(candidates, turns=turns),
        )
    sizes = {"GPT-2": cache_size(decoding_steps(reference, **size)())}
    for execution in ("dense", "auto"):
        run = with_gates(decoding_steps, model, execution, share, **size)
        sizes[f"CCT, {execution}"] = cache_size(run())
    first = sizes["GPT-2"]
    yield Table(
        group="cct_decoding",
        title=f"CCT, memory of the keys and values of {CCT_PAST + STEPS_IN_A_TURN} tokens, {about}",
        results=[Measurement(name=n, value=size / 1e6, ratio=size / first) for n, size in sizes.items()],
        unit="MB",
    )


def with_gates(
    make: Callable[..., Callable], model: nn.Module, execution: str, share: float, **size: int
) -> Callable[[], object]:
    """What `make` gives, with an execution and a share of open gates, from the prompt on."""
    run = run_gated(lambda: make(model, **size), model, execution, share)
    return partial(run_gated, run, model, execution, share)


def compare_steps(candidates: dict[str, Callable], *, turns: int) -> list[Measurement]:
    """Time of one step, of those in each turn."""
    found = compare(candidates, turns=turns, least_seconds=0)
    return [replace(each, value=each.value / STEPS_IN_A_TURN) for each in found]


def plain(hidden_size: int, heads: int) -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(**sizes_of(hidden_size, heads)))


def gated(hidden_size: int, heads: int, attention_type: str, **fields) -> nn.Module:
    config = MoaGPT2Config(attention_type=attention_type, **(sizes_of(hidden_size, heads) | fields))
    return MoaGPT2LMHeadModel(config)


def sizes_of(hidden_size: int, heads: int) -> dict:
    special = {"bos_token_id": 0, "eos_token_id": 0}
    return {"n_embd": hidden_size, "n_head": heads, "n_layer": 6, "vocab_size": 1000, **special}


def prompt(model: nn.Module, *, batch: int, past: int) -> Callable[[], object]:
    """The first call of a generation."""
    ids = torch.randint(0, 1000, (batch, past))

    def run():
        return forward(model, ids, past_key_values=DynamicCache(), use_cache=True)()

    return run


def decoding_steps(model: nn.Module, *, batch: int, past: int) -> Callable[[], object]:
    """A few more tokens for each sequence at each call, one behind another as in a generation. The
    cache grows by them."""
    cache = prompt(model, batch=batch, past=past)().past_key_values
    token = torch.randint(0, 1000, (batch, 1))
    step = forward(model, token, past_key_values=cache, use_cache=True)

    def run():
        for _ in range(STEPS_IN_A_TURN):
            output = step()
        return output

    return run


def cache_size(output) -> int:
    """Bytes of keys and values, and of the room that there is for more."""
    layers = output.past_key_values.layers
    return sum(x.untyped_storage().nbytes() for layer in layers for x in (layer.keys, layer.values))
