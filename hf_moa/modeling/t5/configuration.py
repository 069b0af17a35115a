"""`MoaT5Config`: T5's configuration with the gating fields."""

from __future__ import annotations

from itertools import product
from typing import Any, ClassVar

from transformers import T5Config
from transformers.activations import ACT2FN

from ..config.gating import GatingConfig
from ..core.fields import check_bool, check_int, fail, is_budget
from ..parallel.plans import AttentionNames, FeedForwardNames, ParallelNames


class MoaT5Config(GatingConfig, T5Config):
    """Configuration of the gated T5 family.

    Every field of `transformers.T5Config` keeps its name, meaning and default (`d_kv` is the size of
    an attention head, also under the name `head_dim`); the gating fields are those of
    `GatingConfig`. With the defaults (`attention_type="mha"`, CCT off) the model is transformers'
    own T5, with the same state-dict keys.

    Args:
        cct_budgets (`list` or `None`, defaults to `None`):
            Pairs `[encoder, decoder]` of compute budgets in (0, 1] that training samples from, or
            numbers, which stand for all pairs of them. `None` switches CCT off.
        relative_bias_in_every_layer (`bool`, defaults to `False`):
            Every layer has its own relative position biases, as UMT5's do, not only the first.

    In float16 the last projection of every feed-forward layer stays float32, as T5's does.

    Raises:
        ValueError: a field breaks its rule; the message names the field, the rule and the value.

    Example:
        >>> from hf_moa import MoaT5Config
        >>> config = MoaT5Config(cct_budgets=[[1, 1], [1, 0.5], [0.5, 0.5]])
    """

    model_type = "moa_t5"
    auto_classes: ClassVar[dict[str, str]] = {
        "AutoModel": "MoaT5Model",
        "AutoModelForSeq2SeqLM": "MoaT5ForConditionalGeneration",
        "AutoModelForTextEncoding": "MoaT5EncoderModel",
        "AutoModelForSequenceClassification": "MoaT5ForSequenceClassification",
        "AutoModelForTokenClassification": "MoaT5ForTokenClassification",
        "AutoModelForQuestionAnswering": "MoaT5ForQuestionAnswering",
        "AutoModelForPreTraining": "MoaT5ForConditionalGeneration",
    }
    backbone_sizes: ClassVar[tuple[str, ...]] = (
        "vocab_size",
        "d_model",
        "d_kv",
        "d_ff",
        "num_layers",
        "num_decoder_layers",
        "relative_attention_max_distance",
    )
    backbone_dropouts: ClassVar[tuple[str, ...]] = ("dropout_rate", "classifier_dropout")
    backbone_scales: ClassVar[tuple[str, ...]] = ("layer_norm_epsilon", "initializer_factor")

    fields_of_relatives: ClassVar[tuple[str, ...]] = ("relative_bias_in_every_layer",)

    relative_bias_in_every_layer: bool = False

    def __post_init__(self, **kwargs: Any):
        if isinstance(self.cct_budgets, (list, tuple)):
            # as a JSON file has them
            self.cct_budgets = [list(b) if isinstance(b, tuple) else b for b in self.cct_budgets]
        super().__post_init__(**kwargs)

    def validate_gating(self) -> None:
        super().validate_gating()
        check_int(self, "relative_attention_num_buckets", minimum=4)  # two for either direction
        check_bool(self, "relative_bias_in_every_layer")
        if self.dense_act_fn not in ACT2FN:
            functions = ", ".join(sorted(ACT2FN))
            fail(self, "feed_forward_proj", f"must be one of {functions}, or 'gated-' and one of them")

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> Any:
        """As in transformers; the decoder's has its own number of layers, of which caches are made."""
        found = super().get_text_config(decoder=decoder, encoder=encoder)
        if decoder and found is not self:
            found.num_layers = self.num_decoder_layers
        return found

    def validate_budgets(self) -> None:
        """Check `cct_budgets`: a non-empty list of numbers in (0, 1], or of pairs of such."""
        budgets = self.cct_budgets
        if not isinstance(budgets, (list, tuple)) or len(budgets) == 0:
            fail(self, "cct_budgets", "must be a non-empty list of numbers in (0, 1] or pairs, or None")
        are_pairs = _is_pair(budgets[0])
        for budget in budgets:
            if are_pairs:
                valid = _is_pair(budget) and len(budget) == 2 and all(map(is_budget, budget))
            else:
                valid = is_budget(budget)
            if not valid:
                kind = "pairs [encoder, decoder] of numbers" if are_pairs else "numbers"
                fail(self, "cct_budgets", f"must hold {kind} in (0, 1] only, but holds {budget!r}")

    @property
    def budget_pairs(self) -> list[tuple[float, float]]:
        """The (encoder, decoder) budgets that training samples from."""
        budgets: Any = self.cct_budgets  # asked only with CCT
        if _is_pair(budgets[0]):
            return [tuple(pair) for pair in budgets]
        return list(product(budgets, repeat=2))

    @property
    def drawn_budgets(self) -> list[Any]:
        return self.budget_pairs if self.has_cct else super().drawn_budgets

    @property
    def budget_half(self) -> int | None:
        if not self.is_encoder_decoder:
            return None
        return 1 if self.is_decoder else 0

    @property
    def stack_budgets(self) -> list[float]:
        return [pair[1 if self.is_decoder else 0] for pair in self.budget_pairs]

    @property
    def default_stack_budget(self) -> float:
        if not self.is_encoder_decoder:
            return max(self.stack_budgets)
        largest = max(self.budget_pairs, key=lambda pair: (sum(pair), pair))
        return largest[1 if self.is_decoder else 0]

    @property
    def parallel_names(self) -> ParallelNames:
        """Of a stack, and the embeddings of a model of two."""
        layer = "block.*.layer.*"
        attention = [
            AttentionNames(
                layer=f"{layer}.{name}",
                query=f"{layer}.{name}.q",
                keys={f"{layer}.{name}.k": 1, f"{layer}.{name}.v": 1},
                output=f"{layer}.{name}.o",
            )
            for name in ("SelfAttention", "EncDecAttention")
        ]
        dense = f"{layer}.DenseReluDense"
        feed_forward = FeedForwardNames(
            layer=dense,
            up=tuple(f"{dense}.{name}" for name in ("wi", "wi_0", "wi_1")),
            down=f"{dense}.wo",
            gate=f"{dense}.gate",
        )
        return ParallelNames("block.*", ("shared", "embed_tokens"), tuple(attention), (feed_forward,))

    @property
    def ffn_size(self) -> int:
        return self.d_ff


def _is_pair(budget: Any) -> bool:
    return isinstance(budget, (list, tuple))
