"""Sparse MoE against a feed-forward layer of as many operations, and against transformers' Mixtral."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from layers import step
from tables import Table
from torch import nn
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from hf_moa import MoaBertConfig
from hf_moa.modeling.feed_forward.layers import DenseFeedForward
from hf_moa.modeling.moe.feed_forward import SparseMoeFeedForward
from hf_moa.timing import compare

SELECTED = 2
EXPERTS = (4, 8, 16, 32)


class Size(NamedTuple):
    """Of the layers, and of what they are given."""

    hidden_size: int
    expert_size: int
    batch: int
    length: int


SIZES = {"cpu": Size(512, 1_024, 8, 256), "cuda": Size(1_024, 2_048, 32, 512)}


def measure(*, turns: int, dtype: torch.dtype) -> Iterator[Table]:
    """Feed-forward layers, with k=2 of N experts."""
    size = SIZES[torch.get_default_device().type]
    x = torch.randn(size.batch, size.length, size.hidden_size, dtype=dtype)
    for is_gated, kind in ((False, "as in BERT"), (True, "gated")):
        layers = own_layers(size, is_gated) | (mixtral_layers(size) if is_gated else {})
        for training in (False, True):
            candidates = {
                name: step(layer.to(dtype), x, training=training) for name, layer in layers.items()
            }
            what = "training" if training else "inference"
            yield Table(
                group="moe",
                title=f"sparse MoE, {kind}, {what}",
                results=compare(candidates, turns=turns, title=f"moe {kind}"),
            )


def own_layers(size: Size, is_gated: bool) -> dict[str, nn.Module]:
    form = {"activation": "silu" if is_gated else "gelu", "is_gated": is_gated, "bias": not is_gated}
    width = SELECTED * size.expert_size
    layers: dict[str, nn.Module] = {
        f"dense, width {width:,}": DenseFeedForward(
            hidden_size=size.hidden_size, intermediate_size=width, **form
        )
    }
    config = MoaBertConfig(experts_implementation="grouped_mm")
    for experts in EXPERTS:
        layers[f"MoE, N={experts}"] = SparseMoeFeedForward(
            config,
            hidden_size=size.hidden_size,
            intermediate_size=size.expert_size,
            num_experts=experts,
            num_selected=SELECTED,
            router_type="topk",
            **form,
        )
    return layers


def mixtral_layers(size: Size) -> dict[str, nn.Module]:
    layers = {}
    for experts in EXPERTS:
        config = MixtralConfig(
            hidden_size=size.hidden_size,
            intermediate_size=size.expert_size,
            num_local_experts=experts,
            num_experts_per_tok=SELECTED,
            hidden_act="silu",
            experts_implementation="grouped_mm",
        )
        layer = MixtralSparseMoeBlock(config)
        for parameter in layer.parameters():
            nn.init.normal_(parameter, std=0.02)
        layers[f"Mixtral, N={experts}"] = layer
    return layers
