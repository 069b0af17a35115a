"""Single attention layers of every backbone, for comparisons with the references."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from common import randomize
from families import BERT, GPT2, T5
from references import Weights, bert_weights, gpt2_weights, t5_weights
from torch import Tensor, nn

from hf_moa import MoaBertModel, MoaGPT2Model, MoaT5EncoderModel
from hf_moa.modeling.attention.flow import AttentionFlow
from hf_moa.modeling.bert.layers import MoaBertAttention
from hf_moa.modeling.gpt2.layers import MoaGPT2Attention
from hf_moa.modeling.t5.layers import MoaT5Attention

BACKBONES = ("bert", "bert-decoder", "gpt2", "t5", "t5-decoder")
each_backbone = pytest.mark.parametrize("backbone", BACKBONES)


@dataclass
class Layer:
    """An attention layer in float64: `core` is its `AttentionFlow`, `module` holds all of it."""

    backbone: str
    module: nn.Module
    core: AttentionFlow

    @property
    def weights(self) -> Weights:
        weights = {"bert": bert_weights, "gpt2": gpt2_weights, "t5": t5_weights}
        return weights[self.backbone.split("-")[0]](self.module)

    def parameters(self) -> list[Tensor]:
        """All that the layer's update depends on."""
        return [p for name, p in self.module.named_parameters() if "LayerNorm" not in name]

    def train(self, mode: bool = True) -> Layer:
        self.module.train(mode)
        return self

    def eval(self) -> Layer:
        return self.train(False)

    def __call__(
        self,
        x: Tensor,
        mask: Tensor,
        source: Tensor | None = None,
        source_mask: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        """The update before dropout and residual, and the layer's record."""
        keys = mask if source is None else source_mask
        seen = keys[:, None, :].expand(-1, x.shape[1], -1)
        if self.core.is_causal:
            seen = seen & torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        attention_mask = seen.unsqueeze(1)
        if self.core.config._attn_implementation == "eager":
            zeros = torch.zeros(attention_mask.shape, dtype=torch.float64)
            attention_mask = zeros.masked_fill(~attention_mask, torch.finfo(torch.float64).min)
        result = self.core(
            x,
            attention_mask,
            encoder_hidden_states=source,
            padding_mask=mask,
            encoder_padding_mask=source_mask,
        )
        if self.backbone.startswith("bert"):
            return self.core.output(self.module.output.dense, result), result.record
        return result[0], result[2]


def attention_layer(backbone: str, *, cross: bool = False, seed: int = 0, **fields) -> Layer:
    """A layer away from its initial values, without dropout. `backbone` is one of `BACKBONES`."""
    torch.manual_seed(seed)
    name, _, is_decoder = backbone.partition("-")
    family = {"bert": BERT, "gpt2": GPT2, "t5": T5}[name]
    if is_decoder:
        fields["is_decoder"] = True
        if name == "bert":
            fields["add_cross_attention"] = cross
    config = family.config(**{"attn_implementation": "eager"} | family.no_dropout | fields)
    if name == "bert":
        module = MoaBertAttention(config, layer_idx=0, is_cross_attention=cross)
        core = module.self
    elif name == "gpt2":
        module = core = MoaGPT2Attention(config, layer_idx=0, is_cross_attention=cross)
    else:
        module = core = MoaT5Attention(
            config, layer_idx=0, is_cross_attention=cross, has_relative_attention_bias=not cross
        )
    return Layer(backbone, randomize(module.double(), seed=seed + 2), core)


def new_attention_layer(backbone: str, **fields) -> Layer:
    """The first layer of a new model, with its initial values. `backbone` is "bert", "gpt2" or "t5"."""
    family, model_class = {
        "bert": (BERT, MoaBertModel),
        "gpt2": (GPT2, MoaGPT2Model),
        "t5": (T5, MoaT5EncoderModel),
    }[backbone]
    torch.manual_seed(0)
    model = model_class(family.config(attn_implementation="eager", **family.no_dropout, **fields))
    kinds = (MoaBertAttention, MoaGPT2Attention, MoaT5Attention)
    module = next(each for each in model.modules() if isinstance(each, kinds))
    return Layer(backbone, module.double(), module.self if backbone == "bert" else module)
