"""MoA against multi-head attention with as many heads, against the algorithm of its published code, and
against transformers' JetMoE."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from layers import step
from sorted_moa import SortedMoaAttention
from tables import Table
from transformers import BertConfig, JetMoeConfig
from transformers.models.bert.modeling_bert import BertAttention
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention, GPT2Config
from transformers.models.jetmoe.modeling_jetmoe import JetMoeAttention

from hf_moa import MoaBertConfig, MoaGPT2Config
from hf_moa.modeling.bert.layers import MoaBertAttention
from hf_moa.modeling.gpt2.layers import MoaGPT2Attention
from hf_moa.timing import compare

HEAD_DIM = 64


class Size(NamedTuple):
    """Of the layers, and of what they are given. There are as many active heads as make up d."""

    hidden_size: int
    batch: int
    length: int

    @property
    def heads(self) -> int:
        return self.hidden_size // HEAD_DIM

    @property
    def experts(self) -> tuple[int, ...]:
        return tuple(self.heads * times for times in (1, 2, 4, 8))


SIZES = {"cpu": Size(512, 8, 256), "cuda": Size(1024, 32, 512)}
NO_DROPOUT = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}


def measure(*, turns: int, dtype: torch.dtype, compiled: bool = False) -> Iterator[Table]:
    """Attention layers, with k heads of 64 of N. The peers' algorithms, whose sizes depend on what was
    routed where, do not compile as a whole: compiled, MoA stands only beside multi-head attention."""
    size = SIZES[torch.get_default_device().type]
    x = torch.randn(size.batch, size.length, size.hidden_size, dtype=dtype)
    for training in (False, True):
        what = "training" if training else "inference"
        for kind, layers, peers, extra in (
            ("bidirectional", bidirectional_layers(size), sorted_layers, {}),
            ("causal", causal_layers(size), jetmoe_layers, {"position_embeddings": no_rotation(x)}),
        ):
            candidates = {
                name: step(layer.to(dtype), x, training=training, compiled=compiled)
                for name, layer in layers.items()
            }
            if not compiled:
                candidates |= {
                    name: step(layer.to(dtype), x, training=training, **extra)
                    for name, layer in peers(size).items()
                }
            yield Table(
                group="moa",
                title=f"MoA, {kind} attention, {what}",
                results=compare(candidates, turns=turns, title=f"moa {kind}"),
            )


def bidirectional_layers(size: Size) -> dict[str, torch.nn.Module]:
    sizes = {"hidden_size": size.hidden_size, "num_attention_heads": size.heads, "num_hidden_layers": 1}
    sizes |= NO_DROPOUT | {"attn_implementation": "sdpa"}
    plain = BertAttention(BertConfig(**sizes))
    return {f"multi-head, h={size.heads}": plain} | moa_layers(
        MoaBertAttention, MoaBertConfig, sizes, size
    )


def causal_layers(size: Size) -> dict[str, torch.nn.Module]:
    sizes = {
        "n_embd": size.hidden_size,
        "n_head": size.heads,
        "n_layer": 1,
        "attn_implementation": "sdpa",
    }
    sizes |= {"attn_pdrop": 0.0, "resid_pdrop": 0.0}
    plain = GPT2Attention(GPT2Config(**sizes), layer_idx=0)
    return {f"multi-head, h={size.heads}": plain} | moa_layers(
        MoaGPT2Attention, MoaGPT2Config, sizes, size
    )


def moa_layers(
    layer_class: type, config_class: type, sizes: dict, size: Size
) -> dict[str, torch.nn.Module]:
    fields = {"attention_type": "moa", "head_dim": HEAD_DIM, **sizes}
    return {
        f"MoA, N={experts}": layer_class(
            config_class(num_attention_experts=experts, **fields), layer_idx=0
        )
        for experts in size.experts
    }


def sorted_layers(size: Size) -> dict[str, torch.nn.Module]:
    """The published code's algorithm, on today's attention kernel."""
    return {
        f"sorted rows, N={experts}": SortedMoaAttention(
            hidden_size=size.hidden_size, num_experts=experts, num_selected=size.heads, head_dim=HEAD_DIM
        )
        for experts in size.experts
    }


def jetmoe_layers(size: Size) -> dict[str, torch.nn.Module]:
    """transformers' own mixture of attention heads; it is causal."""
    layers = {}
    for experts in size.experts:
        config = JetMoeConfig(
            hidden_size=size.hidden_size,
            num_hidden_layers=1,
            num_key_value_heads=1,
            kv_channels=HEAD_DIM,
            num_local_experts=experts,
            num_experts_per_tok=size.heads,
            attn_implementation="sdpa",
        )
        layer = JetMoeAttention(config, layer_idx=0)
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        layers[f"JetMoE, N={experts}"] = layer
    return layers


def no_rotation(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (*x.shape[:2], HEAD_DIM)
    return torch.ones(shape, dtype=x.dtype), torch.zeros(shape, dtype=x.dtype)
