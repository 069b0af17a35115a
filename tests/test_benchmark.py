import pytest
import torch
from families import CASE, RELATIVE

from hf_moa.benchmark import benchmark, plain_model
from hf_moa.modeling.core.mechanism import mechanisms_of


@pytest.mark.parametrize("name", ["BertForMaskedLM", "GPT2LMHeadModel", "T5ForConditionalGeneration"])
def test_plain_model_is_that_of_the_same_sizes(name):
    case = CASE[name]
    plain = plain_model(case.build(attention_type="mae", cct_budgets=[1, 0.5]))
    assert not mechanisms_of(plain.config)
    shapes = {key: value.shape for key, value in plain.state_dict().items()}
    expected = {key: value.shape for key, value in case.build_plain().state_dict().items()}
    assert shapes == expected


def test_plain_model_of_a_relative_is_one():
    plain = plain_model(CASE["BertForMaskedLM"].build(attention_type="mae", **RELATIVE))
    assert {name: getattr(plain.config, name) for name in RELATIVE} == RELATIVE


def test_the_model_is_afterwards_as_it_was():
    case = CASE["BertForMaskedLM"]
    model = case.build(cct_budgets=[1, 0.5], cct_execution="sparse").train()
    rows = benchmark(model, case.inputs(), turns=2)
    assert model.training
    assert model.config.cct_execution == "sparse"
    assert [row["execution"] for row in rows] == [None, "dense", "sparse", "sparse"]
    fractions = [
        model.eval()(**case.inputs(), budget=b).compute_fraction.mean().item() for b in (1, 0.5)
    ]
    found = [row["compute_fraction"] for row in rows[1:]]
    assert found == pytest.approx([fractions[0], fractions[0], fractions[1]])


def test_models_without_budgets_are_timed_once():
    case = CASE["GPT2LMHeadModel"]
    rows = benchmark(case.build(attention_type="mae"), case.inputs(), turns=2)
    assert [row["model"] for row in rows] == ["MoaGPT2LMHeadModel without gates", "MoaGPT2LMHeadModel"]
    assert rows[1]["budget"] is rows[1]["compute_fraction"] is rows[1]["execution"] is None


def test_the_model_is_as_it_was_after_an_error_too():
    case = CASE["BertForMaskedLM"]
    model = case.build(cct_budgets=[1, 0.5]).train()
    with pytest.raises(ValueError, match="budget must be one of"):
        benchmark(model, case.inputs(), budgets=[0.3], turns=2)
    assert model.training
    assert model.config.cct_execution == "auto"


def test_plain_model_has_the_active_heads():
    fields = {"num_attention_heads": 3, "head_dim": 12, "num_attention_experts": 6}
    config = plain_model(CASE["BertForMaskedLM"].build(attention_type="moa", **fields)).config
    assert (config.hidden_size, config.num_attention_heads, config.head_dim) == (32, 3, 12)


def test_budgets_need_cct():
    case = CASE["BertForMaskedLM"]
    with pytest.raises(ValueError, match="budgets need a model that has some"):
        benchmark(case.build(), case.inputs(), budgets=[0.5])
    with pytest.raises(ValueError, match="turns must be at least 2"):
        benchmark(case.build(), case.inputs(), turns=1)
    assert not torch.is_inference_mode_enabled()


def test_both_are_compiled(monkeypatch):
    graphs, made = [], torch.compile

    def compile_model(model, **kwargs):
        graphs.append(type(model).__name__)
        return made(model, backend="eager", **kwargs | {"mode": None})

    monkeypatch.setattr(torch, "compile", compile_model)
    case = CASE["BertForMaskedLM"]
    torch.compiler.reset()
    limit = torch._dynamo.config.recompile_limit
    model = case.build(cct_budgets=[1, 0.5], num_hidden_layers=1)
    rows = benchmark(model, case.inputs(), turns=2, compiled=True)
    assert graphs == ["MoaBertForMaskedLM"] * 2
    assert [row["execution"] for row in rows] == [None, "dense", "auto", "auto"]
    expected = [model.eval()(**case.inputs(), budget=b).compute_fraction.mean().item() for b in (1, 0.5)]
    assert [rows[i]["compute_fraction"] for i in (1, 3)] == pytest.approx(expected)
    assert torch._dynamo.config.recompile_limit == limit
