"""Decoding: what MAE's gates cost a step of GPT-2, and what CCT saves a step and its cache."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from cct import drawn, run_gated
from layers import forward
from tables import Table
from torch import nn
from transformers import Cache, DynamicCache, GPT2Config, GPT2LMHeadModel, StaticCache

from hf_moa import MoaGPT2Config, MoaGPT2LMHeadModel
from hf_moa.modeling.cct.static_compact_cache import CompactStaticCache
from hf_moa.timing import Measurement, compare, compiled

MAE_SIZES = ((384, 12), (512, 8), (768, 12))  # d, h
CCT_SIZE = (512, 8)
BATCHES = (1, 4)
SHARES = (1.0, 0.5, 0.33, 0.1)
MAE_PAST, CCT_PAST = 128, 512  # tokens in the cache
SMALL_SIZES, SMALL_PAST = (128, 256, 512), 128
SMALL_BATCHES, SMALL_SHARES = (1, 2, 4, 16), (1.0, 0.5, 0.2)
# compiled: d, h, layers; GPT-2's size and the next on a GPU
STATIC_SIZES = {"cpu": ((512, 8, 6),), "cuda": ((768, 12, 12), (1024, 16, 24))}
STATIC_BATCHES = {"cpu": (1,), "cuda": (1, 8, 64)}
STATIC_SHARES = {"cpu": (1.0,), "cuda": (1.0, 0.5, 0.33, 0.2, 0.1)}
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


def measure_cct(*, turns: int, dtype: torch.dtype, compiled: bool = False) -> Iterator[Table]:
    """6 layers; a step is one token for each sequence, behind those in the cache. Compiled, the cache is
    static, and on a GPU the sizes are GPT-2's."""
    if compiled:
        yield from static_tables(turns=turns, dtype=dtype)
        return
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
    held = {"GPT-2": decoding_steps(reference, **size)().past_key_values}
    for execution in ("dense", "auto"):
        run = with_gates(decoding_steps, model, execution, share, **size)
        held[f"CCT, {execution}"] = run().past_key_values
    yield memory_table(f"the keys and values of {CCT_PAST + STEPS_IN_A_TURN} tokens, {about}", held)


def memory_table(what: str, caches: dict[str, Cache]) -> Table:
    """Megabytes of keys and values, and of the room that there is for more."""
    sizes = {name: cache_size(cache) for name, cache in caches.items()}
    first = sizes["GPT-2"]
    return Table(
        group="cct_decoding",
        title=f"CCT, memory of {what}",
        results=[Measurement(name=n, value=size / 1e6, ratio=size / first) for n, size in sizes.items()],
        unit="MB",
    )


def static_tables(*, turns: int, dtype: torch.dtype) -> Iterator[Table]:
    """Compiled steps, and the memory of keys and values; the gates are open at random."""
    device = torch.get_default_device().type
    for hidden_size, heads, layers in STATIC_SIZES[device]:
        size = sizes_of(hidden_size, heads) | {"n_layer": layers}
        fields = {"cct_budgets": [1, 0.5], "cct_sublayer_norm": False, "attention_type": "mha"}
        share_open = torch.ones(())
        models = {"GPT-2": GPT2LMHeadModel(GPT2Config(**size)).to(dtype).eval()}
        gated_model = MoaGPT2LMHeadModel(MoaGPT2Config(**size, **fields)).to(dtype).eval()
        gated_model.set_cct_gates(partial(drawn, share_open))
        for execution in ("dense", "sparse") if device == "cuda" else ("dense",):
            models[f"CCT, {execution}"] = own = copy.deepcopy(gated_model)
            own.set_cct_execution(execution)
        torch._dynamo.reset()
        steps = {name: compiled(model, dynamic=False) for name, model in models.items()}
        for batch in STATIC_BATCHES[device]:
            for share in STATIC_SHARES[device]:
                share_open.fill_(share)
                about = f"{share:.0%} of the gates open, batch {batch}, d={hidden_size}"
                candidates = {
                    name: static_steps(model, steps[name], batch=batch, past=CCT_PAST)
                    for name, model in models.items()
                }
                yield Table(
                    group="cct_decoding",
                    title=f"CCT, a compiled step behind {CCT_PAST} tokens, {about}",
                    results=compare_steps(candidates, turns=turns),
                )
                held = {"GPT-2": static_prompt(models["GPT-2"], batch=batch, past=CCT_PAST)}
                for name, model in list(models.items())[1:]:
                    make = partial(CompactStaticCache, open_keys=share)
                    held[name] = static_prompt(model, batch=batch, past=CCT_PAST, make=make)
                yield memory_table(
                    f"a static cache of {CCT_PAST + STEPS_IN_A_TURN} tokens, {about}", held
                )


def static_prompt(
    model: nn.Module, *, batch: int, past: int, make: Callable = StaticCache
) -> StaticCache:
    """A static cache behind a prompt, with room for a turn's steps."""
    cache = make(config=model.config, max_cache_len=past + STEPS_IN_A_TURN)
    forward(model, torch.randint(0, 1000, (batch, past)), past_key_values=cache)()
    return cache


def static_steps(
    model: nn.Module, compiled_model: Callable, *, batch: int, past: int
) -> Callable[[], object]:
    """A few more tokens for each sequence at each call, behind a prompt; then they are forgotten."""
    cache = static_prompt(model, batch=batch, past=past)
    token = torch.randint(0, 1000, (batch, 1))
    lengths = [layer.cumulative_length for layer in cache.layers]

    def run():
        with torch.no_grad():
            for _ in range(STEPS_IN_A_TURN):
                output = compiled_model(token, past_key_values=cache)
            torch._foreach_sub_(lengths, STEPS_IN_A_TURN)
        return output

    return run


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


def cache_size(cache: Cache) -> int:
    """Bytes."""
    held = [getattr(layer, "pages", layer) for layer in cache.layers]  # which layers may share
    storages = (x.untyped_storage() for each in held for x in (each.keys, each.values))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
