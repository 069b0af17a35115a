"""The encoders that a gated BERT expresses.

In training, dropout is where BERT has it. The classifiers of RoBERTa, ELECTRA and MPNet have another one
before the pooler, DistilBERT has one in its span classifier and none behind attention.
"""

from __future__ import annotations

from typing import Any

from hf_moa.modeling.bert.family import BERT

from .relative import Relative, must_be

_TWO_LAYERS = {
    r"^classifier\.dense\.": "bert.pooler.dense.",
    r"^classifier\.out_proj\.": "classifier.",
}
_LM_HEAD = {
    r"^lm_head\.dense\.": "cls.predictions.transform.dense.",
    r"^lm_head\.layer_norm\.": "cls.predictions.transform.LayerNorm.",
    r"^lm_head\.": "cls.predictions.",
}


def _check_mlm(config: Any, class_name: str) -> None:
    """The head of masked language models has "gelu", and BERT's the activation of the layers."""
    if class_name.endswith("ForMaskedLM"):
        must_be(config, "hidden_act", "gelu", f"{class_name} has it in its head, BERT's there too")


def _roberta(config: Any, class_name: str) -> dict[str, Any]:
    _check_mlm(config, class_name)
    return {"positions_skip_padding": True}


def _distilbert(config: Any, class_name: str) -> dict[str, Any]:
    reads_pooler = class_name.endswith(("ForSequenceClassification", "ForMultipleChoice"))
    return {
        "hidden_size": config.dim,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "intermediate_size": config.hidden_dim,
        "hidden_act": config.activation,
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "classifier_dropout": config.seq_classif_dropout if reads_pooler else None,
        "layer_norm_eps": 1e-12,
        "type_vocab_size": 0,
        "pooler_act": "relu",
    }


def _electra(config: Any, class_name: str) -> dict[str, Any]:
    _check_mlm(config, class_name)
    fields = {"pooler_act": "gelu"}
    if class_name.endswith("ForMultipleChoice"):
        for name, expected in (
            ("summary_type", "first"),
            ("summary_use_proj", True),
            ("summary_activation", "gelu"),
        ):
            must_be(config, name, expected, "a gated BERT reads the first token by one layer")
        fields |= {"classifier_dropout": config.summary_last_dropout}
    return fields


def _mpnet(config: Any, class_name: str) -> dict[str, Any]:
    _check_mlm(config, class_name)
    must_be(config, "pad_token_id", 1, "MPNet's positions begin behind it")
    must_be(config, "relative_attention_num_buckets", 32, "MPNet uses as many")
    return {"positions_skip_padding": True, "type_vocab_size": 0}


_ROBERTA: dict[str, Any] = {
    "family": BERT,
    "fields": _roberta,
    "names": {r"^roberta\.": "bert."} | _TWO_LAYERS | _LM_HEAD,
}
ROBERTA = Relative(model_type="roberta", prefix="Roberta", **_ROBERTA)
XLM_ROBERTA = Relative(model_type="xlm-roberta", prefix="XLMRoberta", **_ROBERTA)
CAMEMBERT = Relative(model_type="camembert", prefix="Camembert", **_ROBERTA)
DISTILBERT = Relative(
    model_type="distilbert",
    prefix="DistilBert",
    family=BERT,
    fields=_distilbert,
    names={
        r"^distilbert\.": "bert.",
        r"\btransformer\.layer\.": "encoder.layer.",
        r"\.attention\.q_lin\.": ".attention.self.query.",
        r"\.attention\.k_lin\.": ".attention.self.key.",
        r"\.attention\.v_lin\.": ".attention.self.value.",
        r"\.attention\.out_lin\.": ".attention.output.dense.",
        r"\.sa_layer_norm\.": ".attention.output.LayerNorm.",
        r"\.ffn\.lin1\.": ".intermediate.dense.",
        r"\.ffn\.lin2\.": ".output.dense.",
        r"\.output_layer_norm\.": ".output.LayerNorm.",
        r"^pre_classifier\.": "bert.pooler.dense.",
        r"^vocab_transform\.": "cls.predictions.transform.dense.",
        r"^vocab_layer_norm\.": "cls.predictions.transform.LayerNorm.",
        r"^vocab_projector\.weight$": "cls.predictions.decoder.weight",
        r"^vocab_projector\.bias$": "cls.predictions.bias",
    },
)
ELECTRA = Relative(
    model_type="electra",
    prefix="Electra",
    family=BERT,
    fields=_electra,
    names={
        r"^electra\.": "bert.",
        r"\bembeddings_project\.": "embeddings.projection.",
        r"^generator_predictions\.": "cls.predictions.transform.",
        r"^generator_lm_head\.weight$": "cls.predictions.decoder.weight",
        r"^generator_lm_head\.bias$": "cls.predictions.bias",
        r"^sequence_summary\.summary\.": "bert.pooler.dense.",
        r"^discriminator_predictions\.": "discriminator.",
    }
    | _TWO_LAYERS,
    own_classes={"replaced-token-detection": "ForPreTraining"},
)
MPNET = Relative(
    model_type="mpnet",
    prefix="MPNet",
    family=BERT,
    fields=_mpnet,
    names={
        r"^mpnet\.": "bert.",
        r"\.attention\.attn\.q\.": ".attention.self.query.",
        r"\.attention\.attn\.k\.": ".attention.self.key.",
        r"\.attention\.attn\.v\.": ".attention.self.value.",
        r"\.attention\.attn\.o\.": ".attention.output.dense.",
        r"\.attention\.LayerNorm\.": ".attention.output.LayerNorm.",
    }
    | _TWO_LAYERS
    | _LM_HEAD,
)
RELATIVES = (ROBERTA, XLM_ROBERTA, CAMEMBERT, DISTILBERT, ELECTRA, MPNET)
