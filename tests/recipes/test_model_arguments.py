"""Which model the flags of the scripts name."""

import pytest
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from hf_moa import MoaGPT2Config
from hf_moa.recipes.gating import GatingArguments
from hf_moa.recipes.models import ModelArguments, load_model

SIZES = {"n_layer": 1, "n_embd": 32, "n_head": 4, "n_positions": 16, "vocab_size": 40}
TOKENS = {"vocab_size": 23, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


def load(gating_args=None, **model_args):
    gating_args = gating_args or GatingArguments()
    tokenizer = range(TOKENS["vocab_size"])
    return load_model(AutoModelForCausalLM, ModelArguments(**model_args), gating_args, tokenizer, TOKENS)


def test_config_of_a_model_from_scratch(tmp_path):
    MoaGPT2Config(**SIZES, attention_type="mae", mae_gate_window=3).save_pretrained(tmp_path)
    config = load(config_name=tmp_path, config_overrides="n_inner=48").config
    assert (config.n_layer, config.attention_type, config.mae_gate_window) == (1, "mae", 3)
    assert (config.n_inner, config.vocab_size, config.bos_token_id) == (48, 23, 0)
    config = load(GatingArguments(attention_type="mae", mae_gate_window=5), config_name=tmp_path).config
    assert (config.n_layer, config.mae_gate_window) == (1, 5)


def test_config_in_the_place_of_a_checkpoints(tmp_path):
    GPT2LMHeadModel(GPT2Config(**SIZES)).save_pretrained(tmp_path / "model")
    GPT2Config(**SIZES, attn_pdrop=0.3).save_pretrained(tmp_path / "config")
    model = load(model_name_or_path=tmp_path / "model", config_name=tmp_path / "config")
    assert model.config.attn_pdrop == 0.3
    assert model.transformer.h[0].attn.attn_dropout.p == 0.3


@pytest.mark.parametrize("attention_type", ["none", "mae"])
def test_how_attention_is_computed(tmp_path, attention_type):
    GPT2LMHeadModel(GPT2Config(**SIZES)).save_pretrained(tmp_path)
    gates = GatingArguments(attention_type=attention_type)
    model = load(gates, model_name_or_path=tmp_path, attn_implementation="eager")
    assert model.config._attn_implementation == "eager"
    new = {"model_type": "moa_gpt2", "config_overrides": "n_layer=1,n_embd=8,n_head=2"}
    assert load(gates, **new, attn_implementation="eager").config._attn_implementation == "eager"
    assert load(gates, **new).config._attn_implementation == "sdpa"


@pytest.mark.parametrize("trusted", [True, False])
def test_code_of_a_model_is_trusted_where_asked(trusted, monkeypatch):
    found = []
    make = AutoModelForCausalLM.from_config
    monkeypatch.setattr(
        AutoModelForCausalLM,
        "from_config",
        lambda config, **options: found.append(options) or make(config, **options),
    )
    load(model_type="gpt2", config_overrides="n_layer=1,n_embd=8,n_head=2", trust_remote_code=trusted)
    assert found == [{"trust_remote_code": trusted}]


@pytest.mark.parametrize(
    "model_args",
    [
        {},
        {"model_type": "moa_gpt2", "config_name": "c"},
        {"model_type": "moa_gpt2", "model_name_or_path": "m"},
    ],
    ids=["none", "type and config", "type and checkpoint"],
)
def test_model_has_one_origin(model_args):
    with pytest.raises(
        ValueError, match=r"either `model_name_or_path`.* or `model_type` or `config_name`"
    ):
        ModelArguments(**model_args)


def test_gates_need_the_config_of_a_gated_model(tmp_path):
    GPT2Config(**SIZES).save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"must be a field of GPT2Config, the config of `model_type` gpt2"
    ):
        load(GatingArguments(attention_type="mae"), config_name=tmp_path)
