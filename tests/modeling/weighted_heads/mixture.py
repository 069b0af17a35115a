"""Its layers: Z = sum_j w_j H_j, with w a parameter."""

import torch
from torch import nn
from transformers import initialization as init

from hf_moa.modeling.attention.multi_head import MultiHead
from hf_moa.modeling.core.slots import MIXTURES


class HeadWeights(nn.Module):
    gate_kind = "weighted"
    neutral_layers = ()

    def __init__(self, num_heads, start):
        super().__init__()
        self.start = start
        self.weight = nn.Parameter(torch.empty(num_heads))
        self.initialize()

    def initialize(self, scales=None):
        init.constant_(self.weight, self.start)

    def forward(self, context, ranks):
        return context * ranks.part(self.weight, 0)[:, None]


@MIXTURES.filled_by("weighted")
class WeightedHeads(MultiHead):
    def __init__(self, *, num_heads, head_dim, start):
        super().__init__(num_heads=num_heads, head_dim=head_dim)
        self.weights = HeadWeights(num_heads, start)

    @classmethod
    def from_config(cls, config, *, hidden_size, num_heads, head_dim, is_causal):
        return cls(num_heads=num_heads, head_dim=head_dim, start=config.weighted_start)

    def output(self, linear, context, mix):
        return super().output(linear, self.weights(context, self.ranks), mix)
