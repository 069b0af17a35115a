"""The mechanisms of a model in words: what they do, their fields, and the papers."""

from __future__ import annotations

import math
from typing import Any

from hf_moa.field_meanings import field_meaning
from hf_moa.markdown import table
from hf_moa.modeling.config.gating import GatingConfig

_PENG = """@inproceedings{peng-etal-2020-mixture,
  title = {A Mixture of h - 1 Heads is Better than h Heads},
  author = {Peng, Hao and Schwartz, Roy and Li, Dianqi and Smith, Noah A.},
  booktitle = {Proceedings of the 58th Annual Meeting of the Association for Computational Linguistics},
  year = {2020},
  pages = {6566--6577},
  eprint = {2005.06537},
  archivePrefix = {arXiv}
}"""
_ZHANG = """@inproceedings{zhang-etal-2022-mixture,
  title = {Mixture of Attention Heads: Selecting Attention Heads Per Token},
  author = {Zhang, Xiaofeng and Shen, Yikang and Huang, Zeyu and Zhou, Jie and Rong, Wenge and
            Xiong, Zhang},
  booktitle = {Proceedings of the 2022 Conference on Empirical Methods in Natural Language Processing},
  year = {2022},
  pages = {4150--4162},
  doi = {10.18653/v1/2022.emnlp-main.278}
}"""
_SHAZEER = """@inproceedings{shazeer-etal-2017-outrageously,
  title = {Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts Layer},
  author = {Shazeer, Noam and Mirhoseini, Azalia and Maziarz, Krzysztof and Davis, Andy and Le, Quoc and
            Hinton, Geoffrey and Dean, Jeff},
  booktitle = {International Conference on Learning Representations},
  year = {2017},
  eprint = {1701.06538},
  archivePrefix = {arXiv}
}"""
_BAPNA = """@article{bapna-etal-2020-controlling,
  title = {Controlling Computation versus Quality for Neural Sequence Models},
  author = {Bapna, Ankur and Arivazhagan, Naveen and Firat, Orhan},
  journal = {arXiv preprint arXiv:2002.07106},
  year = {2020}
}"""

_MAE_FIELDS = ("mae_num_dropped_heads", "mae_gate_type")
_MAE_GATE_FIELDS = ("mae_gate_hidden_size", "mae_gate_dropout", "mae_gate_window")
_ROUTER_FIELDS = (
    "router_type",
    "router_balance_loss_coef",
    "router_z_loss_coef",
    "router_importance_loss_coef",
    "router_load_loss_coef",
)
_MOE_FIELDS = ("ffn_type", "num_ffn_experts", "num_ffn_experts_per_token")
_CCT_FIELDS = (
    "cct_budgets",
    "cct_num_ffn_splits",
    "cct_gate_hidden_size",
    "cct_noise_max",
    "cct_budget_loss_coef",
    "cct_sublayer_norm",
    "cct_execution",
)


def mechanism_tags(config: GatingConfig) -> list[str]:
    """Those of "mae", "moa", "moe" and "cct" that the model has."""
    present = {
        "mae": config.attention_type == "mae",
        "moa": config.attention_type == "moa",
        "moe": config.ffn_type == "moe",
        "cct": config.has_cct,
    }
    return [tag for tag, is_present in present.items() if is_present]


def mechanism_phrases(config: GatingConfig) -> list[str]:
    """What sets the model apart, in a few words for each mechanism."""
    phrases = {
        "mae": "whose attention is a weighted mixture of subsets of its heads (MAE)",
        "moa": "whose attention sends each token to some of its heads (MoA)",
        "moe": "whose feed-forward layers send each token to some of their experts (sparse MoE)",
        "cct": "whose layers skip computation to meet a budget chosen per call (CCT)",
    }
    return [phrases[tag] for tag in mechanism_tags(config)]


def mechanisms_in_words(config: GatingConfig) -> str:
    """A paragraph for each mechanism, and the table of the fields that apply."""
    paragraphs = {"mae": _mae, "moa": _moa, "moe": _moe, "cct": _cct}
    words = [paragraphs[tag](config) for tag in mechanism_tags(config)]
    if config.attention_type == "mha":
        words.insert(0, "The attention is the backbone's own: multi-head, without gates.")
    rows = [
        [f"`{name}`", f"`{_value(config, name)}`", _meaning(config, name)]
        for name in fields_in_use(config)
    ]
    fields = "Fields of the configuration that apply to this model:"
    return "\n\n".join([*words, fields, table(["field", "value", "meaning"], rows)])


def fields_in_use(config: GatingConfig) -> list[str]:
    """The gating fields that change what this model is or how it trains."""
    names = ["attention_type"]
    if config.attention_type == "mae":
        names += _MAE_FIELDS
        if config.mae_gate_type == "learned":
            names += _MAE_GATE_FIELDS
            if not _has_causal_layers(config):
                names.remove("mae_gate_window")
    if config.attention_type == "moa":
        names.append("num_attention_experts")
    if config.ffn_type == "moe":
        names += _MOE_FIELDS
    if config.attention_type == "moa" or config.ffn_type == "moe":
        names += [name for name in _ROUTER_FIELDS if getattr(config, name)]  # a loss that weighs nothing
    if config.has_cct:
        names += _CCT_FIELDS
    return names


def citations(config: GatingConfig, *, is_ftg: bool) -> list[str]:
    """BibTeX entries of the papers whose mechanisms the model has."""
    tags = mechanism_tags(config)
    is_routed = "moa" in tags or "moe" in tags
    cited = {
        _PENG: "mae" in tags or is_ftg,
        _ZHANG: "moa" in tags,
        _SHAZEER: "moe" in tags or (is_routed and config.router_type == "noisy_topk"),
        _BAPNA: "cct" in tags,
    }
    return [entry for entry, is_cited in cited.items() if is_cited]


def _value(config: GatingConfig, name: str) -> Any:
    return config.attention_experts if name == "num_attention_experts" else getattr(config, name)


def _meaning(config: GatingConfig, name: str) -> str:
    meaning = field_meaning(type(config).__doc__, name) or field_meaning(GatingConfig.__doc__, name)
    return meaning[:1].upper() + meaning[1:]


def _mae(config: GatingConfig) -> str:
    heads, dropped = config.num_attention_heads, config.mae_num_dropped_heads
    text = (
        f"**MAE** (Peng et al. 2020). An attention layer of {heads} heads is a mixture of "
        f"{math.comb(heads, dropped)} experts: every way to leave out {dropped} of the heads. "
    )
    if config.mae_gate_type == "uniform":
        return text + "All weigh the same (UNI-MAE), so there are no gates."
    text += (
        "A gate in each attention layer looks at the mean of the layer's inputs and weighs the experts"
    )
    return text + (
        "; where a layer is causal, it looks back alone." if _has_causal_layers(config) else "."
    )


def _has_causal_layers(config: GatingConfig) -> bool:
    return config.model_type != "moa_bert" or config.is_decoder


def _moa(config: GatingConfig) -> str:
    return (
        f"**MoA** (Zhang et al. 2022). An attention layer has {config.attention_experts} heads of size "
        f"{config.attention_head_dim}, each with query and output projections of its own, and one key "
        "and one value projection for all. A router sends each token to "
        f"{config.num_attention_heads} of them and weighs what they give."
    )


def _moe(config: GatingConfig) -> str:
    return (
        f"**Sparse MoE** (Shazeer et al. 2017). A router sends each token to "
        f"{config.num_ffn_experts_per_token} of the {config.num_ffn_experts} feed-forward experts of a "
        "layer."
    )


def _cct(config: GatingConfig) -> str:
    return (
        "**CCT** (Bapna et al. 2020). Gates decide for each token what a layer computes: its key and "
        f"value, its attention, and each of {config.cct_num_ffn_splits} parts of the feed-forward "
        "layer. The call chooses a budget, the share of that computation to aim at; the model was "
        f"trained for {_distinct(config.cct_budgets)}. Without a choice it takes the largest."
    )


def _distinct(budgets: list) -> str:
    pairs = [tuple(b) if isinstance(b, (list, tuple)) else b for b in budgets]
    return ", ".join(map(str, dict.fromkeys(pairs)))
