"""`MoaLlamaConfig`: Llama's configuration with the gating fields."""

from __future__ import annotations

from typing import ClassVar

from transformers import LlamaConfig

from hf_moa.modeling.config.gating import GatingConfig
from hf_moa.modeling.parallel.plans import AttentionNames, FeedForwardNames, ParallelNames


class MoaLlamaConfig(GatingConfig, LlamaConfig):
    """`transformers.LlamaConfig`, and the fields of `GatingConfig`."""

    model_type = "moa_llama"
    auto_classes: ClassVar[dict[str, str]] = {
        "AutoModel": "MoaLlamaModel",
        "AutoModelForCausalLM": "MoaLlamaForCausalLM",
        "AutoModelForSequenceClassification": "MoaLlamaForSequenceClassification",
        "AutoModelForTokenClassification": "MoaLlamaForTokenClassification",
        "AutoModelForQuestionAnswering": "MoaLlamaForQuestionAnswering",
    }
    backbone_sizes: ClassVar[tuple[str, ...]] = ("vocab_size", "hidden_size", "num_hidden_layers")
    backbone_dropouts: ClassVar[tuple[str, ...]] = ("attention_dropout",)
    backbone_scales: ClassVar[tuple[str, ...]] = ("rms_norm_eps", "initializer_range")

    num_key_value_heads: int | None = None  # the backbone's

    @property
    def parallel_names(self) -> ParallelNames:
        attention = AttentionNames(
            layer="layers.*.self_attn",
            query="layers.*.self_attn.q_proj",
            keys={"layers.*.self_attn.k_proj": 1, "layers.*.self_attn.v_proj": 1},
            output="layers.*.self_attn.o_proj",
        )
        feed_forward = FeedForwardNames(
            layer="layers.*.mlp",
            up=("layers.*.mlp.gate_proj", "layers.*.mlp.up_proj"),
            down="layers.*.mlp.down_proj",
            gate="layers.*.mlp.gate",
        )
        return ParallelNames("layers.*", ("embed_tokens",), (attention,), (feed_forward,))

    @property
    def ffn_size(self) -> int:
        return self.intermediate_size
