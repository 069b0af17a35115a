"""`MoaGPT2Config`: GPT-2's configuration with the gating fields."""

from __future__ import annotations

from typing import ClassVar

from transformers import GPT2Config

from ..config.gating import GatingConfig
from ..config.head_dim import HeadDim
from ..core.fields import check_activation, check_int
from ..parallel.plans import AttentionNames, FeedForwardNames, ParallelNames, Projections


class MoaGPT2Config(GatingConfig, GPT2Config):
    """Configuration of the gated GPT-2 family.

    Every field of `transformers.GPT2Config` keeps its name, meaning and default; the gating fields
    are those of `GatingConfig`. With the defaults (`attention_type="mha"`, CCT off) the model is
    transformers' own GPT-2, with the same state-dict keys.

    Args:
        head_dim (`int` or `None`, defaults to `None`):
            Size of one attention head. `None` means n_embd / n_head, which reading it gives.

    Raises:
        ValueError: a field breaks its rule; the message names the field, the rule and the value.

    Example:
        >>> from hf_moa import MoaGPT2Config
        >>> config = MoaGPT2Config(attention_type="mae", mae_gate_window=50)
    """

    model_type = "moa_gpt2"
    auto_classes: ClassVar[dict[str, str]] = {
        "AutoModel": "MoaGPT2Model",
        "AutoModelForCausalLM": "MoaGPT2LMHeadModel",
        "AutoModelForSequenceClassification": "MoaGPT2ForSequenceClassification",
        "AutoModelForTokenClassification": "MoaGPT2ForTokenClassification",
        "AutoModelForQuestionAnswering": "MoaGPT2ForQuestionAnswering",
        "AutoModelForPreTraining": "MoaGPT2LMHeadModel",
    }
    backbone_sizes: ClassVar[tuple[str, ...]] = ("vocab_size", "n_positions", "n_embd", "n_layer")
    backbone_dropouts: ClassVar[tuple[str, ...]] = (
        "resid_pdrop",
        "embd_pdrop",
        "attn_pdrop",
        "summary_first_dropout",
    )
    backbone_scales: ClassVar[tuple[str, ...]] = ("layer_norm_epsilon", "initializer_range")

    head_dim: int | None = HeadDim()  # type: ignore[assignment]  # reads and writes the field

    def validate_gating(self) -> None:
        super().validate_gating()
        self.validate_head_dim()
        check_activation(self, "activation_function")
        if self.n_inner is not None:
            check_int(self, "n_inner", minimum=1)

    @property
    def parallel_names(self) -> ParallelNames:
        kind = Projections(are_transposed=True)
        attention = [
            AttentionNames(
                layer=f"h.*.{name}",
                query=f"h.*.{name}.q_attn",
                keys={f"h.*.{name}.c_attn": 2},
                output=f"h.*.{name}.c_proj",
                kind=kind,
                fuses=name == "attn",
            )
            for name in ("attn", "crossattention")
        ]
        feed_forward = FeedForwardNames(
            layer="h.*.mlp",
            up=("h.*.mlp.c_fc",),
            down="h.*.mlp.c_proj",
            gate="h.*.mlp.gate",
            kind=kind,
        )
        return ParallelNames("h.*", ("wte",), tuple(attention), (feed_forward,))

    @property
    def ffn_size(self) -> int:
        return self.n_inner if self.n_inner is not None else 4 * self.n_embd
