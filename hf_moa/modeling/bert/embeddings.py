"""What BERT and its relatives make of token ids."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.bert.modeling_bert import BertEmbeddings

from .configuration import MoaBertConfig


class MoaBertEmbeddings(BertEmbeddings):
    """BERT's embeddings, and those of its relatives: positions that skip padding, no token types, a
    projection to the layers' size. CCT's control symbol is added to every token's."""

    def __init__(self, config: MoaBertConfig):
        nn.Module.__init__(self)
        size, padding = config.embedding_width, config.pad_token_id
        self.word_embeddings = nn.Embedding(config.vocab_size, size, padding_idx=padding)
        self.position_embeddings = nn.Embedding(
            config.max_position_embeddings,
            size,
            padding_idx=padding if config.positions_skip_padding else None,
        )
        self.has_token_types = config.type_vocab_size > 0
        if self.has_token_types:
            self.token_type_embeddings = nn.Embedding(config.type_vocab_size, size)
        self.LayerNorm = nn.LayerNorm(size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        # as transformers' class has them, which initialises them
        positions = torch.arange(config.max_position_embeddings).expand((1, -1))
        self.register_buffer("position_ids", positions, persistent=False)
        self.register_buffer("token_type_ids", torch.zeros_like(positions), persistent=False)
        self.projection = None
        if size != config.hidden_size:
            self.projection = nn.Linear(size, config.hidden_size)
        self.first_position = config.first_position
        self.padding_id = padding if config.positions_skip_padding else None

    def _positions(self, input_ids: Tensor | None, past: int, new: int) -> Tensor:
        """`[B or 1, T]` int64, of `new` tokens behind `past` cached ones. Of embeddings nobody knows
        which are padding: they all count."""
        if self.padding_id is None or input_ids is None:
            first = self.first_position + past
            return self.position_ids[:, first : first + new]
        is_real = (input_ids != self.padding_id).long()
        return (is_real.cumsum(dim=1) + past) * is_real + self.padding_id

    def forward(
        self,
        input_ids: Tensor | None = None,
        token_type_ids: Any = None,
        position_ids: Any = None,
        inputs_embeds: Any = None,
        past_key_values_length: int = 0,
        control_symbol: Tensor | None = None,
    ) -> Tensor:
        if inputs_embeds is None:
            inputs_embeds = self.word_embeddings(input_ids)
        if position_ids is None:
            length = inputs_embeds.shape[1]
            position_ids = self._positions(input_ids, past_key_values_length, length)
        if control_symbol is not None:
            inputs_embeds = inputs_embeds + control_symbol
        if self.has_token_types:
            x = super().forward(
                inputs_embeds=inputs_embeds, token_type_ids=token_type_ids, position_ids=position_ids
            )
        else:
            x = inputs_embeds + self.position_embeddings(position_ids)
            x = self.dropout(self.LayerNorm(x))
        return x if self.projection is None else self.projection(x)
