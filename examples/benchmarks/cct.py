"""CCT: what skipping saves, on whole encoders whose gates are open at random."""

import copy
from collections.abc import Callable, Iterator
from functools import partial

import torch
from layers import forward
from tables import Table
from torch import nn
from transformers import BertConfig, BertModel

from hf_moa import MoaBertConfig, MoaBertModel
from hf_moa.timing import compare

SIZES = {"cpu": ((384, 12), (768, 12)), "cuda": ((768, 12), (1024, 16))}  # d, h
BATCHES = {"cpu": (8, 32), "cuda": (32, 256)}
SHARES = (1.0, 0.8, 0.5, 0.33, 0.2, 0.1)


def measure(*, turns: int, dtype: torch.dtype, compiled: bool = False) -> Iterator[Table]:
    """6 layers, 128 tokens. Control networks are computed, and their decisions replaced. Compiled, all
    is computed whatever they decide, except by the kernels for GPUs in half precision."""
    device = torch.get_default_device().type
    for hidden_size, heads in SIZES[device]:
        sizes = {
            "hidden_size": hidden_size,
            "num_attention_heads": heads,
            "intermediate_size": 4 * hidden_size,
            "num_hidden_layers": 6,
            "vocab_size": 1000,
        }
        plain = BertModel(BertConfig(**sizes)).to(dtype)
        gated = MoaBertModel(MoaBertConfig(cct_budgets=[1, 0.5], cct_sublayer_norm=False, **sizes)).to(
            dtype
        )
        for batch in BATCHES[device]:
            ids = torch.randint(0, 1000, (batch, 128))
            size = f"batch {batch}, d={hidden_size}"
            if compiled:
                yield from compiled_tables(plain, gated, ids, size, turns=turns)
                continue
            for share in SHARES:
                candidates: dict[str, Callable] = {"BertModel": forward(plain, ids)}
                for execution in ("dense", "sparse", "auto"):
                    run = partial(run_gated, forward(gated, ids), gated, execution, share)
                    candidates[f"CCT, {execution}"] = run
                yield Table(
                    group="cct",
                    title=f"CCT, {share:.0%} of the gates open, {size}",
                    results=compare(candidates, turns=turns, title=f"cct {share}"),
                )


def compiled_tables(
    plain: nn.Module, gated: nn.Module, ids: torch.Tensor, size: str, *, turns: int
) -> Iterator[Table]:
    """Each model is compiled once: the share of open gates is a number on the device."""
    share_open = torch.ones(())
    candidates = {"BertModel": forward(plain, ids, compiled=True)}
    shares, executions = (1.0,), ["dense"]
    if ids.is_cuda:
        shares, executions = SHARES, ["dense", "sparse"]
    for execution in executions:
        model = copy.deepcopy(gated)
        model.set_cct_execution(execution)
        model.set_cct_gates(partial(drawn, share_open))
        candidates[f"CCT, {execution}"] = forward(model, ids, compiled=True)
    for share in shares:
        share_open.fill_(share)
        of_gates = f"{share:.0%} of the gates open, " if len(shares) > 1 else ""
        title = f"CCT, {of_gates}{size}"
        yield Table("cct", title, compare(candidates, turns=turns, title=title))


def drawn(share: torch.Tensor, network: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Gates `[B, T, n]` of a `ControlNetwork`, open at random."""
    return (torch.rand(*x.shape[:-1], network.num_gates) < share).to(x.dtype)


def run_gated(run: Callable[[], object], model: nn.Module, execution: str, share: float) -> object:
    """A call of the model with an execution and a share of open gates."""
    model.set_cct_execution(execution)
    model.set_cct_gates(share)
    return run()
