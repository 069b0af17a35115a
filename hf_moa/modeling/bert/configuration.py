"""`MoaBertConfig`: BERT's configuration with the gating fields."""

from __future__ import annotations

from typing import ClassVar

from transformers import BertConfig

from ..config.gating import GatingConfig
from ..config.head_dim import HeadDim
from ..core.fields import check_activation, check_bool, check_int, check_number, fail
from ..parallel.plans import AttentionNames, FeedForwardNames, ParallelNames


class MoaBertConfig(GatingConfig, BertConfig):
    """Configuration of the gated BERT family.

    Every field of `transformers.BertConfig` keeps its name, meaning and default; the gating fields
    are those of `GatingConfig`. With the defaults (`attention_type="mha"`, CCT off) the model is
    transformers' own BERT, with the same state-dict keys.

    Args:
        head_dim (`int` or `None`, defaults to `None`):
            Size of one attention head. `None` means hidden_size / num_attention_heads, which reading it
            gives.
        pre_norm (`bool`, defaults to `False`):
            Normalise the input of each sub-layer instead of its output, and the encoder's output
            once (the layout of the CCT paper). `False` is BERT's post-LN.
        embedding_size (`int` or `None`, defaults to `None`):
            Size of the embeddings, which a linear layer takes to `hidden_size`, as ELECTRA's. `None`
            means hidden_size, without such a layer.
        type_vocab_size (`int`, defaults to 2):
            As in BERT; 0 means no embeddings of token types, as in DistilBERT and MPNet, and
            `token_type_ids` are left out.
        positions_skip_padding (`bool`, defaults to `False`):
            Positions count the tokens that are not `pad_token_id`, and begin behind it, as RoBERTa's do:
            sequences may have `max_position_embeddings - pad_token_id - 1` tokens. `False` counts all
            tokens from 0.
        relative_attention_num_buckets (`int` or `None`, defaults to `None`):
            Number of T5's buckets of distances in a table of biases on the attention scores, which all
            layers share, as MPNet's do. `None` means no such biases. Not with `is_decoder`.
        pooler_act (`str`, defaults to `"tanh"`):
            Activation of the pooler, which classifiers of sequences and of choices read.
        sparse_prediction (`bool`, defaults to `False`):
            Masked language models: in training, compute only the logits of the labelled tokens. The
            same loss, for less time and memory. (The name is ModernBERT's, where it holds in eval too.)

    Raises:
        ValueError: a field breaks its rule; the message names the field, the rule and the value.

    Example:
        >>> from hf_moa import MoaBertConfig
        >>> config = MoaBertConfig(attention_type="moa", num_attention_experts=24)
    """

    model_type = "moa_bert"
    auto_classes: ClassVar[dict[str, str]] = {
        "AutoModel": "MoaBertModel",
        "AutoModelForMaskedLM": "MoaBertForMaskedLM",
        "AutoModelForSequenceClassification": "MoaBertForSequenceClassification",
        "AutoModelForTokenClassification": "MoaBertForTokenClassification",
        "AutoModelForQuestionAnswering": "MoaBertForQuestionAnswering",
        "AutoModelForMultipleChoice": "MoaBertForMultipleChoice",
        "AutoModelForPreTraining": "MoaBertForMaskedLM",
        "AutoModelForTextEncoding": "MoaBertModel",
    }
    backbone_sizes: ClassVar[tuple[str, ...]] = (
        "vocab_size",
        "max_position_embeddings",
        "hidden_size",
        "num_hidden_layers",
        "intermediate_size",
    )
    backbone_dropouts: ClassVar[tuple[str, ...]] = (
        "hidden_dropout_prob",
        "attention_probs_dropout_prob",
    )
    backbone_scales: ClassVar[tuple[str, ...]] = ("layer_norm_eps", "initializer_range")

    fields_of_relatives: ClassVar[tuple[str, ...]] = (
        "embedding_size",
        "positions_skip_padding",
        "relative_attention_num_buckets",
        "pooler_act",
    )

    head_dim: int | None = HeadDim()  # type: ignore[assignment]  # reads and writes the field
    pre_norm: bool = False
    embedding_size: int | None = None
    positions_skip_padding: bool = False
    relative_attention_num_buckets: int | None = None
    pooler_act: str = "tanh"
    sparse_prediction: bool = False

    def validate_gating(self) -> None:
        super().validate_gating()
        check_bool(self, "pre_norm")
        check_bool(self, "sparse_prediction")
        check_int(self, "embedding_size", minimum=1, optional=True)
        check_int(self, "type_vocab_size", minimum=0)
        check_activation(self, "pooler_act")
        self._check_positions()
        if self.classifier_dropout is not None:
            check_number(self, "classifier_dropout", minimum=0.0, maximum=1.0)
        check_activation(self, "hidden_act")
        self.validate_head_dim()

    def _check_positions(self) -> None:
        check_bool(self, "positions_skip_padding")
        if self.positions_skip_padding:
            check_int(self, "pad_token_id", minimum=0)
            if self.max_tokens < 1:
                fail(
                    self,
                    "max_position_embeddings",
                    f"must be at least pad_token_id + 2 = {self.pad_token_id + 2} with "  # type: ignore[operator]  # an int
                    "positions_skip_padding",
                )
        # two for either direction
        check_int(self, "relative_attention_num_buckets", minimum=4, optional=True)
        if self.relative_attention_num_buckets is not None and self.is_decoder:
            fail(self, "relative_attention_num_buckets", "must be None with is_decoder=True")

    @property
    def parallel_names(self) -> ParallelNames:
        layer = "encoder.layer.*"
        attention = [
            AttentionNames(
                layer=f"{layer}.{name}.self",
                query=f"{layer}.{name}.self.query",
                keys={f"{layer}.{name}.self.key": 1, f"{layer}.{name}.self.value": 1},
                output=f"{layer}.{name}.output.dense",
            )
            for name in ("attention", "crossattention")
        ]
        feed_forward = FeedForwardNames(
            layer=f"{layer}.feed_forward",
            up=(f"{layer}.intermediate.dense",),
            down=f"{layer}.output.dense",
            gate=f"{layer}.feed_forward_gate",
        )
        return ParallelNames(
            "encoder.layer.*", ("embeddings.word_embeddings",), tuple(attention), (feed_forward,)
        )

    @property
    def has_plain_backbone(self) -> bool:
        return super().has_plain_backbone and not self.pre_norm and self.type_vocab_size > 0

    @property
    def embedding_width(self) -> int:
        return self.embedding_size or self.hidden_size

    @property
    def first_position(self) -> int:
        """Position of the first token."""
        return self.pad_token_id + 1 if self.positions_skip_padding else 0  # type: ignore[operator]  # an int

    @property
    def max_tokens(self) -> int:
        """Length of the longest sequence."""
        return self.max_position_embeddings - self.first_position

    @property
    def ffn_size(self) -> int:
        return self.intermediate_size
