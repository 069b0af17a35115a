"""What cards say of the mechanisms: tags, fields, words, papers."""

import re

import pytest
from cards import bib_keys, sections

from hf_moa import MoaBertConfig, MoaGPT2Config, MoaT5Config
from hf_moa.model_card import model_card
from hf_moa.model_card.mechanisms import fields_in_use

VARIANTS = {
    "mha": ({}, [], []),
    "mae": ({"attention_type": "mae"}, ["mae"], ["peng-etal-2020-mixture"]),
    "moa": ({"attention_type": "moa"}, ["moa"], ["zhang-etal-2022-mixture"]),
    "moa-noisy": (
        {"attention_type": "moa", "router_type": "noisy_topk"},
        ["moa"],
        ["zhang-etal-2022-mixture", "shazeer-etal-2017-outrageously"],
    ),
    "moe": ({"ffn_type": "moe"}, ["moe"], ["shazeer-etal-2017-outrageously"]),
    "cct": ({"cct_budgets": [1, 0.5]}, ["cct"], ["bapna-etal-2020-controlling"]),
    "mae-cct": (
        {"attention_type": "mae", "cct_budgets": [1, 0.5]},
        ["mae", "cct"],
        ["peng-etal-2020-mixture", "bapna-etal-2020-controlling"],
    ),
}


@pytest.mark.parametrize("config_class", [MoaBertConfig, MoaGPT2Config, MoaT5Config])
@pytest.mark.parametrize("variant", VARIANTS)
def test_tags_and_citations_are_those_of_the_mechanisms_in_use(variant, config_class):
    fields, tags, keys = VARIANTS[variant]
    card = model_card(config_class(**fields), name="out")
    assert card.data.tags == ["hf_moa", *tags]
    assert bib_keys(card) == keys


@pytest.mark.parametrize("config_class", [MoaBertConfig, MoaGPT2Config, MoaT5Config])
def test_every_field_that_applies_stands_with_value_and_meaning(config_class):
    config = config_class(
        attention_type="moa", ffn_type="moe", router_type="noisy_topk", cct_budgets=[1, 0.5],
        router_importance_loss_coef=0.5, router_load_loss_coef=0.5, num_attention_experts=20,
    )  # fmt: skip
    text = sections(model_card(config, name="out"))["Mechanism"]
    lines = re.findall(r"^\| `(\w+)` \| `(.*)` \| (.*) \|$", text, flags=re.MULTILINE)
    values = {name: value for name, value, _ in lines}
    assert values == {name: str(getattr(config, name)) for name in fields_in_use(config)}
    assert values["num_attention_experts"] == "20"
    assert all(len(meaning) > 5 for *_, meaning in lines)


def test_fields_of_other_mechanisms_do_not_stand():
    mae = ["attention_type", "mae_num_dropped_heads", "mae_gate_type"]
    gate = ["mae_gate_hidden_size", "mae_gate_dropout"]
    assert list(fields_in_use(MoaBertConfig())) == ["attention_type"]
    assert list(fields_in_use(MoaBertConfig(attention_type="mae"))) == [*mae, *gate]
    assert list(fields_in_use(MoaGPT2Config(attention_type="mae"))) == [*mae, *gate, "mae_gate_window"]
    assert list(fields_in_use(MoaBertConfig(attention_type="mae", mae_gate_type="uniform"))) == mae
    assert list(fields_in_use(MoaBertConfig(attention_type="moa"))) == [
        "attention_type",
        "num_attention_experts",
        "moa_execution",
        "moa_key_value_heads",
        "router_type",
        "router_balance_loss_coef",
        "router_z_loss_coef",
    ]


def test_words_have_the_models_numbers():
    config = MoaBertConfig(attention_type="mae", mae_num_dropped_heads=2, num_attention_heads=8)
    assert "layer of 8 heads is a mixture of 28 experts" in model_card(config, name="out").text
    config = MoaBertConfig(attention_type="moa", num_attention_heads=8, head_dim=128)
    text = model_card(config, name="out").text
    assert "16 heads of size 128" in text
    config.moa_key_value_heads = 4
    assert "for each of 4 groups of them. A router sends each token to 2 of each group" in " ".join(
        model_card(config, name="out").text.split()
    )
    assert "each token to 8 of them" in text
    config = MoaT5Config(ffn_type="moe", cct_budgets=[[1, 1], [1, 0.5], [1, 1]])
    text = model_card(config, name="out").text
    assert "2 of the 8 feed-forward experts" in text
    assert "trained for (1, 1), (1, 0.5)." in text
