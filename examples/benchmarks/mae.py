"""MAE against the plain layer of transformers: what the gates cost."""

from collections.abc import Iterator

import torch
from layers import step
from tables import Table
from transformers import BertConfig, GPT2Config
from transformers.models.bert.modeling_bert import BertLayer
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from hf_moa import MoaBertConfig, MoaGPT2Config
from hf_moa.modeling.bert.layers import MoaBertLayer
from hf_moa.modeling.gpt2.layers import MoaGPT2Block
from hf_moa.modeling.mae.mixture import MixtureOfHeads
from hf_moa.timing import compare

# d, h
SIZES = {"cpu": ((384, 12), (512, 8), (768, 12)), "cuda": ((768, 12), (1024, 16))}
BATCH = {"cpu": (8, 128), "cuda": (64, 256)}  # sequences, tokens


def measure(*, turns: int, dtype: torch.dtype, compiled: bool = False) -> Iterator[Table]:
    """Layers, forward and with backward."""
    device = torch.get_default_device().type
    for hidden_size, heads in SIZES[device]:
        x = torch.randn(*BATCH[device], hidden_size, dtype=dtype)
        for kind, layers in (("bidirectional", bert_layers), ("causal", gpt2_layers)):
            for training in (False, True):
                what = "training" if training else "inference"
                candidates = {
                    name: step(layer.to(dtype), x, training=training, compiled=compiled)
                    for name, layer in layers(hidden_size, heads).items()
                    if training or name != "MAE, F step"
                }
                yield Table(
                    group="mae",
                    title=f"MAE, {kind} layer, {what}, d={hidden_size}",
                    results=compare(candidates, turns=turns, title=f"mae d={hidden_size}"),
                )


def bert_layers(hidden_size: int, heads: int) -> dict[str, torch.nn.Module]:
    sizes = {
        "hidden_size": hidden_size,
        "num_attention_heads": heads,
        "intermediate_size": 4 * hidden_size,
        "num_hidden_layers": 1,
    }
    return {
        "BertLayer": BertLayer(BertConfig(attn_implementation="sdpa", **sizes)),
        "MAE": MoaBertLayer(
            MoaBertConfig(attention_type="mae", attn_implementation="sdpa", **sizes), layer_idx=0
        ),
    }


def gpt2_layers(hidden_size: int, heads: int) -> dict[str, torch.nn.Module]:
    sizes = {"n_embd": hidden_size, "n_head": heads, "n_layer": 1, "attn_implementation": "sdpa"}
    expert_phase = MoaGPT2Block(MoaGPT2Config(attention_type="mae", **sizes), layer_idx=0)
    for module in expert_phase.modules():
        if isinstance(module, MixtureOfHeads):
            module.phase = "expert"
    return {
        "GPT2Block": GPT2Block(GPT2Config(**sizes), layer_idx=0),
        "MAE": MoaGPT2Block(MoaGPT2Config(attention_type="mae", **sizes), layer_idx=0),
        "MAE, F step": expert_phase,
    }
