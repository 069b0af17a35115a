"""PEFT's own methods on gated models: what they adapt where they are not told, and MoA's experts."""

import peft
import pytest
import torch
from adapted import predict
from families import CASE
from peft import LoraConfig, get_peft_model
from peft.utils import constants
from training_runs import build

METHODS = ["LoraConfig", "IA3Config", "VeraConfig"]
PLAIN = {
    "bert": CASE["BertForSequenceClassification"],
    "gpt2": CASE["GPT2LMHeadModel"],
    "t5": CASE["T5ForConditionalGeneration"],
}


def adapted_names(model, method):
    """The modules that a method adapts where it is not told which."""
    model = get_peft_model(model, getattr(peft, method)())
    return {
        name
        for name, module in model.named_modules()
        if isinstance(module, peft.tuners.tuners_utils.BaseTunerLayer)
    }


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("fields", [{}, {"attention_type": "mae"}], ids=["mha", "mae"])
@pytest.mark.parametrize("name", PLAIN)
def test_defaults_are_those_of_the_backbone(name, fields, method):
    expected = adapted_names(PLAIN[name].build_plain(), method)
    assert expected
    assert adapted_names(build(name, **fields), method) == expected


def test_what_peft_knows_of_a_model_itself_stays(monkeypatch):
    from hf_moa.peft_registration import register_target_modules

    table = constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    monkeypatch.setitem(table, "moa_bert", ["key"])
    register_target_modules("moa_bert", "bert")
    assert table["moa_bert"] == ["key"]


EXPERTS = {  # LoraConfig's target_modules, target_parameters
    "bert": (["value"], ["query.weight", "attention.output.dense.weight"]),
    "gpt2": ([], ["attn.q_attn.weight", "attn.c_proj.weight"]),
    "t5": (["v"], ["q.weight", "o.weight"]),
}


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_are_parameters(name):
    """LoRA of MoA: the update enters the output, and is what merging leaves."""
    model = build(name, attention_type="moa").double()
    before = predict(name, model.eval())
    modules, parameters = EXPERTS[name]
    model = get_peft_model(model, LoraConfig(target_modules=modules, target_parameters=parameters))
    torch.manual_seed(0)
    updates = {name: p for name, p in model.named_parameters() if "lora_B" in name}
    for kind in (*modules, *(each.removesuffix(".weight") for each in parameters)):
        assert any(f".{kind}.lora_B" in name for name in updates)
    for parameter in updates.values():
        torch.nn.init.normal_(parameter, std=0.5)
    after = predict(name, model.eval())
    assert (after - before).abs().max() > 1e-2
    torch.testing.assert_close(predict(name, model.merge_and_unload()), after)
