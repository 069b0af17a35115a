"""`MoaBertConfig`: BERT's configuration with the gating fields."""

from __future__ import annotations

from typing import ClassVar

from transformers import BertConfig

from ..config.gating import GatingConfig
from ..config.head_dim import HeadDim
from ..core.fields import check_activation, check_bool, check_number


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
        "type_vocab_size",
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

    head_dim: int | None = HeadDim()  # type: ignore[assignment]  # reads and writes the field
    pre_norm: bool = False
    sparse_prediction: bool = False

    def validate_gating(self) -> None:
        super().validate_gating()
        check_bool(self, "pre_norm")
        check_bool(self, "sparse_prediction")
        if self.classifier_dropout is not None:
            check_number(self, "classifier_dropout", minimum=0.0, maximum=1.0)
        check_activation(self, "hidden_act")
        self.validate_head_dim()

    @property
    def ffn_size(self) -> int:
        return self.intermediate_size
