"""The configurations: defaults, rules, and errors that name the field, the rule and the value."""

import json
import re

import pytest
import torch
from common import TINY, tiny_config
from families import BERT, GPT2, T5
from transformers import AutoConfig

from hf_moa import MoaBertConfig, MoaBertModel

each_family = pytest.mark.parametrize("family", [BERT, GPT2, T5], ids=lambda family: family.name)


@each_family
def test_defaults_are_the_backbones(family):
    config = family.config_class()
    for name, value in family.plain_config_class().to_dict().items():
        if name not in ("model_type", "transformers_version"):
            assert getattr(config, name) == value, name
    assert (config.attention_type, config.ffn_type, config.cct_budgets) == ("mha", "dense", None)
    assert config.model_type == f"moa_{family.name}"


def test_prints_every_field_as_the_backbones_do():
    config = MoaBertConfig(attention_type="mae", hidden_size=96)
    assert repr(config) == f"MoaBertConfig {config.to_json_string()}"


def test_paper_names():
    config = MoaBertConfig(
        attention_type="moa", num_attention_heads=8, num_attention_experts=16, head_dim=128
    )
    assert (config.num_attention_heads, config.attention_experts, config.head_dim) == (
        8,
        16,
        128,
    )
    assert MoaBertConfig(attention_type="moa").attention_experts == 24
    assert MoaBertConfig().head_dim == 64


@pytest.mark.parametrize("family", [BERT, GPT2], ids=lambda family: family.name)
def test_size_of_a_head_is_a_number_that_is_not_saved(family, tmp_path):
    config = family.config()
    assert config.head_dim == config.hidden_size // config.num_attention_heads == 8
    config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()).get("head_dim") is None
    other = type(config).from_pretrained(tmp_path, num_attention_heads=2)
    assert other.head_dim == 16  # not that of another number of heads
    config.num_attention_heads = 8
    assert config.head_dim == 4
    config.head_dim = 12
    config.save_pretrained(tmp_path)
    assert type(config).from_pretrained(tmp_path, num_attention_heads=2).head_dim == 12


BAD = [
    ({"attention_type": "gqa"}, "attention_type", "gqa"),
    ({"attention_type": None}, "attention_type", "None"),
    ({"attention_type": "mae", "mae_num_dropped_heads": 0}, "mae_num_dropped_heads", "0"),
    ({"attention_type": "mae", "mae_num_dropped_heads": 4}, "mae_num_dropped_heads", "4"),
    ({"mae_num_dropped_heads": True}, "mae_num_dropped_heads", "True"),
    (
        {"attention_type": "mae", "num_attention_heads": 32, "mae_num_dropped_heads": 16},
        "mae_num_dropped_heads",
        "601,080,390",
    ),
    ({"mae_gate_type": "hard"}, "mae_gate_type", "hard"),
    ({"mae_gate_hidden_size": 0}, "mae_gate_hidden_size", "0"),
    ({"mae_gate_hidden_size": 2.5}, "mae_gate_hidden_size", "2.5"),
    ({"mae_gate_dropout": 1.0}, "mae_gate_dropout", "1.0"),
    ({"mae_gate_dropout": -0.1}, "mae_gate_dropout", "-0.1"),
    ({"mae_gate_dropout": float("nan")}, "mae_gate_dropout", "nan"),
    ({"mae_gate_window": 0}, "mae_gate_window", "0"),
    ({"attention_type": "moa", "num_attention_experts": 3}, "num_attention_experts", "3"),
    ({"num_attention_experts": "8"}, "num_attention_experts", "8"),
    ({"head_dim": -8, "attention_type": "moa"}, "head_dim", "-8"),
    ({"num_attention_heads": 5}, "num_attention_heads", "5"),
    ({"router_type": "hash"}, "router_type", "hash"),
    ({"router_balance_loss_coef": -1}, "router_balance_loss_coef", "-1"),
    ({"router_z_loss_coef": float("inf")}, "router_z_loss_coef", "inf"),
    ({"router_importance_loss_coef": "0.1"}, "router_importance_loss_coef", "0.1"),
    ({"router_load_loss_coef": 0.1}, "router_load_loss_coef", "0.1"),
    ({"ffn_type": "glu"}, "ffn_type", "glu"),
    ({"num_ffn_experts": 0}, "num_ffn_experts", "0"),
    ({"ffn_type": "moe", "num_ffn_experts_per_token": 9}, "num_ffn_experts_per_token", "9"),
    ({"cct_budgets": []}, "cct_budgets", "[]"),
    ({"cct_budgets": 0.5}, "cct_budgets", "0.5"),
    ({"cct_budgets": [1, 0]}, "cct_budgets", "0"),
    ({"cct_budgets": [1.5]}, "cct_budgets", "1.5"),
    ({"cct_budgets": ["1"]}, "cct_budgets", "1"),
    ({"cct_budgets": [[1, 1]]}, "cct_budgets", "[1, 1]"),
    ({"cct_budgets": [float("nan")]}, "cct_budgets", "nan"),
    ({"cct_budgets": [1], "cct_num_ffn_splits": 5}, "cct_num_ffn_splits", "5"),
    ({"cct_gate_hidden_size": 0}, "cct_gate_hidden_size", "0"),
    ({"cct_noise_max": -1.0}, "cct_noise_max", "-1.0"),
    ({"cct_budget_loss_coef": -0.5}, "cct_budget_loss_coef", "-0.5"),
    ({"cct_budget_loss": "max"}, "cct_budget_loss", "max"),
    ({"cct_gate_training": "noisy"}, "cct_gate_training", "noisy"),
    ({"cct_budget_bias": 1}, "cct_budget_bias", "1"),
    ({"cct_budgets": [1, 0.5], "cct_control_symbols": False}, "cct_control_symbols", "False"),
    ({"cct_budgets": [1, 0.5], "cct_full_budget_is_plain": True}, "cct_sublayer_norm=False", "True"),
    (
        {"cct_budgets": [0.5, 0.3], "cct_sublayer_norm": False, "cct_full_budget_is_plain": True},
        "a budget of 1 and a smaller one",
        "True",
    ),
    (
        {"cct_budgets": [1, 1.0], "cct_sublayer_norm": False, "cct_full_budget_is_plain": True},
        "a budget of 1 and a smaller one",
        "True",
    ),
    ({"cct_sublayer_norm": "yes"}, "cct_sublayer_norm", "yes"),
    ({"cct_execution": "fast"}, "cct_execution", "fast"),
    ({"pre_norm": 1}, "pre_norm", "1"),
    ({"sparse_prediction": None}, "sparse_prediction", "None"),
    ({"output_router_logits": "all"}, "output_router_logits", "all"),
    ({"hidden_size": "32"}, "hidden_size", "32"),
    ({"hidden_size": -32}, "hidden_size", "-32"),
    ({"hidden_size": 0}, "hidden_size", "0"),
    ({"vocab_size": -1}, "vocab_size", "-1"),
    ({"num_hidden_layers": -1}, "num_hidden_layers", "-1"),
    ({"intermediate_size": 0}, "intermediate_size", "0"),
    ({"hidden_dropout_prob": 2.0}, "hidden_dropout_prob", "2.0"),
    ({"attention_probs_dropout_prob": -1.0}, "attention_probs_dropout_prob", "-1.0"),
    ({"hidden_dropout_prob": "none"}, "hidden_dropout_prob", "none"),
]


@pytest.mark.parametrize(("fields", "name", "value"), BAD, ids=[str(row[0]) for row in BAD])
def test_bad_value_is_an_error_that_names_it(fields, name, value):
    with pytest.raises(ValueError, match=name) as error:
        MoaBertConfig(**TINY | fields)
    assert value in str(error.value)


@pytest.mark.parametrize(("fields", "name", "value"), BAD, ids=[str(row[0]) for row in BAD])
def test_bad_value_set_later_is_an_error_when_a_model_is_built(fields, name, value):
    config = tiny_config()
    with pytest.raises(ValueError, match=name):  # noqa: PT012 - either of the two may notice first
        for field, bad in fields.items():
            setattr(config, field, bad)
        with torch.device("meta"):
            MoaBertModel(config)


def test_bad_value_beside_a_directory_is_an_error(tmp_path):
    tiny_config().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="mae_num_dropped_heads"):
        AutoConfig.from_pretrained(tmp_path, attention_type="mae", mae_num_dropped_heads=9)
    config, unused = AutoConfig.from_pretrained(
        tmp_path, attention_type="mae", unknown=1, return_unused_kwargs=True
    )
    assert (config.attention_type, unused) == ("mae", {"unknown": 1})
    with pytest.raises(ValueError, match=r"cct_budgets.*\{0.5\}"):
        AutoConfig.from_pretrained(tmp_path, cct_budgets={0.5})


def test_a_config_of_before_there_were_fields_means_what_it_did(tmp_path):
    config = tiny_config(cct_budgets=[1, 0.5], cct_budget_loss_coef=1.0)
    new = ("cct_gate_training", "cct_budget_bias", "cct_control_symbols", "cct_full_budget_is_plain")
    old = {k: v for k, v in config.to_dict().items() if k not in (*new, "cct_budget_loss")}
    loaded = MoaBertConfig.from_dict(old)
    assert (loaded.cct_budget_loss, loaded.cct_budget_loss_coef) == ("mean", 1.0)
    assert [getattr(loaded, name) for name in new] == ["soft", False, True, False]
    loaded.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).cct_budget_loss == "mean"
    # what is new means what it says
    assert MoaBertConfig.from_dict(config.to_dict()).cct_budget_loss == "sum"
    plain = MoaBertConfig.from_dict(old | {"cct_budgets": None})
    assert plain.cct_budget_loss == "sum"


@each_family
def test_config_of_a_plain_directory_is_a_gated_one(family, tmp_path):
    family.plain_config_class(**family.tiny).save_pretrained(tmp_path)
    config = family.config_class.from_pretrained(tmp_path, attention_type="mae")
    assert config.model_type == f"moa_{family.name}"
    assert config.hidden_size == 32
    config.save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is family.config_class


# A gating field of each kind; all are written once, so that one family shows the rest.
SHARED_BAD = [
    ({"attention_type": "gqa"}, "attention_type", "gqa"),
    ({"attention_type": "mae", "mae_num_dropped_heads": 4}, "mae_num_dropped_heads", "4"),
    ({"attention_type": "moa", "num_attention_experts": 3}, "num_attention_experts", "3"),
    ({"cct_budgets": [1], "cct_num_ffn_splits": 5}, "cct_num_ffn_splits", "5"),
    ({"cct_budgets": []}, "cct_budgets", "[]"),
    ({"cct_budgets": [1.5]}, "cct_budgets", "1.5"),
    ({"router_load_loss_coef": 0.1}, "router_load_loss_coef", "0.1"),
]
FAMILY_BAD = [
    (GPT2, {"n_embd": "32"}, "n_embd", "32"),
    (GPT2, {"n_head": 0}, r"\.n_head must .*; n_head is num_attention_heads, too", "0"),
    (GPT2, {"num_attention_heads": 0}, r"\.n_head must .*; n_head is num_attention_heads, too", "0"),
    (GPT2, {"n_inner": 0}, "n_inner", "0"),
    (GPT2, {"activation_function": "foo"}, "activation_function", "foo"),
    (BERT, {"hidden_act": "foo"}, "hidden_act", "foo"),
    (T5, {"feed_forward_proj": "gated-foo"}, "feed_forward_proj", "gated-foo"),
    (T5, {"feed_forward_proj": "foo"}, "feed_forward_proj", "foo"),
    (T5, {"num_heads": 0}, r"\.num_heads must .*; num_heads is num_attention_heads, too", "0"),
    (T5, {"d_kv": 0}, "d_kv", "0"),
    (T5, {"head_dim": 0}, r"\.d_kv must .*; d_kv is head_dim, too", "0"),
    (GPT2, {"n_head": 5}, "num_attention_heads", "5"),
    (GPT2, {"cct_budgets": [[1, 1]]}, "cct_budgets", "[1, 1]"),
    (T5, {"d_model": "32"}, "d_model", "32"),
    (T5, {"cct_budgets": [[1, 1], 0.5]}, "cct_budgets", "0.5"),
    (T5, {"cct_budgets": [1, [1, 0.5]]}, "cct_budgets", "[1, 0.5]"),
    (T5, {"cct_budgets": [[1, 1, 1]]}, "cct_budgets", "[1, 1, 1]"),
    (T5, {"cct_budgets": [[1, 0]]}, "cct_budgets", "[1, 0]"),
    (T5, {"cct_budgets": 0.5}, "cct_budgets", "0.5"),
    (T5, {"feed_forward_proj": "gelu-gated-x"}, "feed_forward_proj", "gelu-gated-x"),
    (T5, {"relative_attention_num_buckets": 3}, "relative_attention_num_buckets", "3"),
    (BERT, {"classifier_dropout": 2.0}, "classifier_dropout", "2.0"),
    (BERT, {"chunk_size_feed_forward": -1}, "chunk_size_feed_forward", "-1"),
    (GPT2, {"num_key_value_heads": 2}, "num_key_value_heads", "2"),
    (T5, {"attention_type": "moa", "num_key_value_heads": 3}, "moa_key_value_heads", "3"),
]
ALL_BAD = [(family, *row) for family in (GPT2, T5) for row in SHARED_BAD] + FAMILY_BAD


@pytest.mark.parametrize(
    ("family", "fields", "name", "value"), ALL_BAD, ids=[f"{row[0].name}-{row[1]}" for row in ALL_BAD]
)
def test_bad_value_of_any_family_is_an_error_that_names_it(family, fields, name, value):
    with pytest.raises(ValueError, match=name) as error:
        family.config(**fields)
    assert value in str(error.value)


def test_budgets_of_t5():
    numbers = T5.config(cct_budgets=[1, 0.5])
    assert set(numbers.budget_pairs) == {(1, 1), (1, 0.5), (0.5, 1), (0.5, 0.5)}
    pairs = T5.config(cct_budgets=[(1, 1), (1, 1), (0.5, 0.25)])
    assert pairs.cct_budgets == [[1, 1], [1, 1], [0.5, 0.25]]
    assert pairs.stack_budgets == [1, 1, 0.5]
    pairs.is_decoder = True
    assert pairs.stack_budgets == [1, 1, 0.25]
    assert T5.config(cct_budgets=[[1, 0.2], [0.9, 0.9]]).default_stack_budget == 0.9
    encoder_alone = T5.config(cct_budgets=[[1, 0.2], [0.9, 0.9]], is_encoder_decoder=False)
    assert encoder_alone.default_stack_budget == 1
    later = T5.config()
    later.cct_budgets = ((1, 1), (0.5, 0.25))
    later.validate_gating()
    assert later.stack_budgets == [1, 0.5]


def test_names_of_t5_and_gpt2_are_understood():
    config = T5.config(attention_type="moa", head_dim=12, num_attention_heads=2)
    assert (config.d_kv, config.num_heads, config.head_dim) == (12, 2, 12)
    config = GPT2.config(num_attention_heads=2)
    assert (config.n_head, config.head_dim, config.ffn_size) == (2, 16, 48)
    assert GPT2.config(n_inner=None).ffn_size == 128


def test_cross_attention_needs_a_decoder():
    with pytest.raises(ValueError, match="is_decoder"):
        MoaBertModel(tiny_config(add_cross_attention=True))


@each_family
def test_bad_sizes_dropouts_and_scales_of_the_backbone_are_errors(family):
    for name in family.config_class.backbone_sizes:
        with pytest.raises(ValueError, match=rf"{name} must be an integer of at least 1 \(got 0\)"):
            family.config(**{name: 0})
    for name in family.config_class.backbone_dropouts:
        with pytest.raises(ValueError, match=rf"{name} must be .* \(got 1\.5\)"):
            family.config(**{name: 1.5})
    for name in family.config_class.backbone_scales:
        for value in (-0.5, float("nan")):
            with pytest.raises(ValueError, match=rf"{name} must be a finite number .*got {value}"):
                family.config(**{name: value})


@each_family
def test_heads_of_keys_follow_from_the_attention(family):
    for heads in (1, 2):
        config = family.config(attention_type="moa", num_key_value_heads=heads)
        assert config.num_key_value_heads == config.moa_key_value_heads == heads
        assert type(config).from_dict(config.to_dict()).num_key_value_heads == heads
    plain = family.config(num_key_value_heads=4)
    assert not hasattr(plain, "num_key_value_heads")
    assert "num_key_value_heads" not in plain.to_dict()


# --- fields that do nothing, or are none -------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "hint"),
    [
        ({"attention_typ": "mae"}, "did you mean attention_type"),
        ({"cct_buget": [1, 0.5]}, "did you mean cct_budgets"),
        ({"mae_gate_windows": 3}, "did you mean mae_gate_window"),
        ({"num_ffn_expert": 4}, "did you mean num_ffn_experts"),
        ({"router_temperature": 2.0}, "there are router_type, router_balance_loss_coef"),
        ({"moa_experts": 8}, "there are"),
    ],
    ids=str,
)
@pytest.mark.parametrize("family", [BERT, GPT2, T5], ids=lambda family: family.name)
def test_misspelled_gating_fields_are_refused(family, field, hint, tmp_path):
    ((name, value),) = field.items()
    message = (
        rf"{family.config_class.__name__} has no field {name} \(got {re.escape(repr(value))}\): {hint}"
    )
    with pytest.raises(ValueError, match=message):
        family.config(**field)
    family.config().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        family.config_class.from_pretrained(tmp_path, **field)


def test_fields_of_others_are_kept():
    config = MoaBertConfig(my_own_field=3, num_experts=4, router_aux_loss_coef=0.1)
    assert (config.my_own_field, config.num_experts) == (3, 4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mae_gate_window": 3}, "MoaBertConfig.mae_gate_window=3 does nothing: mae is off."),
        (
            {"attention_type": "mae", "mae_gate_type": "uniform", "mae_gate_dropout": 0.2},
            "MoaBertConfig.mae_gate_dropout=0.2 does nothing: mae_gate_type='uniform' has no gates.",
        ),
        (
            {"num_attention_experts": 9},
            "MoaBertConfig.num_attention_experts=9 does nothing: moa is off.",
        ),
        ({"router_type": "noisy_topk"}, "MoaBertConfig.router_type='noisy_topk' does nothing"),
        ({"cct_noise_max": 1.0}, "MoaBertConfig.cct_noise_max=1.0 does nothing: cct is off."),
        (
            {"cct_gate_training": "hard"},
            "MoaBertConfig.cct_gate_training='hard' does nothing: cct is off",
        ),
        (
            {"cct_budgets": [1, 0.5], "cct_budget_loss": "mean", "cct_budget_loss_coef": 0.0},
            "MoaBertConfig.cct_budget_loss='mean' does nothing: cct_budget_loss_coef is 0.",
        ),
        ({"attention_type": "mae", "mae_gate_window": 3}, None),
        ({"ffn_type": "moe", "router_type": "noisy_topk", "num_ffn_experts": 3}, None),
        ({"output_router_logits": True}, None),
    ],
    ids=str,
)
def test_fields_without_effect_are_named_once(fields, message, monkeypatch, tmp_path):
    said = []
    monkeypatch.setattr("hf_moa.modeling.config.gating.logger.warning_once", said.append)
    config = MoaBertConfig(**fields)
    assert len(said) == (message is not None)
    assert message is None or said[0].startswith(message)
    config.save_pretrained(tmp_path)
    said.clear()
    MoaBertConfig.from_pretrained(tmp_path)  # what was saved was said before
    assert not said
    MoaBertConfig().save_pretrained(tmp_path / "plain")
    MoaBertConfig.from_pretrained(tmp_path / "plain", **fields)
    assert len(said) == (message is not None)
