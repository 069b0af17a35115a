"""What BERT and its relatives read from the layers: the pooler, and heads for tokens."""

from __future__ import annotations

from torch import Tensor, nn
from transformers.models.bert.modeling_bert import BertOnlyMLMHead, BertPooler

from ..core.activations import build_activation
from .configuration import MoaBertConfig


class MoaBertPooler(BertPooler):
    """BERT's pooler, with the activation that the model's relatives have there."""

    def __init__(self, config: MoaBertConfig):
        super().__init__(config)
        self.activation = build_activation(config.pooler_act)  # type: ignore[assignment]  # any function


class MoaBertMLMHead(BertOnlyMLMHead):
    """BERT's head for masked tokens, which goes to the embeddings' size."""

    def __init__(self, config: MoaBertConfig):
        super().__init__(config)
        size = config.embedding_width
        if size != config.hidden_size:
            transform = self.predictions.transform
            transform.dense = nn.Linear(config.hidden_size, size)
            transform.LayerNorm = nn.LayerNorm(size, eps=config.layer_norm_eps)
            self.predictions.decoder = nn.Linear(size, config.vocab_size)


class MoaBertDiscriminator(nn.Module):
    """ELECTRA's head: for each token, whether it was replaced."""

    def __init__(self, config: MoaBertConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = build_activation(config.hidden_act)
        self.dense_prediction = nn.Linear(config.hidden_size, 1)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """`[B, T, d]` -> `[B, T]`."""
        return self.dense_prediction(self.activation(self.dense(hidden_states))).squeeze(-1)
