"""Models sorted by the importance of their heads and neurons."""

import pytest
import torch
from families import CASE, CASES

import hf_moa
from hf_moa.importance import Importance
from hf_moa.pretrained_weights import layers_in, name_in_base_model

MODELS = ["BertForSequenceClassification", "GPT2LMHeadModel", "T5ForConditionalGeneration"]
each_model = pytest.mark.parametrize("name", MODELS)

# the input projections' module of an attention and of a feed-forward layer
_LAST = {"bert": ("output.dense", "output.dense"), "gpt2": ("c_proj", "c_proj"), "t5": ("o", "wo")}


def build(name, **fields):
    case = CASE[name]
    model = case.build_plain(**fields).double()
    inputs = case.inputs() | case.labels()
    inputs.pop("decoder_input_ids", None)
    return case, model, inputs


@pytest.mark.covering
@pytest.mark.parametrize("fields", [{}, {"cct_budgets": [1, 0.5]}, {"attention_type": "mae"}], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.plain_name)
def test_a_sorted_model_computes_the_same(case, fields):
    plain = case.build_plain().double()
    scores = random_scores(case, plain)
    model = hf_moa.upcycle(plain, importance=scores, **fields)
    plainly = hf_moa.upcycle(plain, **fields)
    inputs = case.inputs()
    torch.testing.assert_close(model(**inputs)[0], plain(**inputs)[0], atol=1e-11, rtol=0)
    changed = [n for n, p in model.named_parameters() if not torch.equal(p, plainly.get_parameter(n))]
    assert changed


def random_scores(case, plain):
    layout = hf_moa.families.family_of(plain.config).layout(plain.config)
    names = list(plain.state_dict())
    generator = torch.Generator().manual_seed(0)
    return Importance(
        *(
            {
                name_in_base_model(n, plain): torch.rand(number, generator=generator)
                for n in layers_in(names, pattern)
            }
            for pattern, number in ((layout.attention, 4), (layout.feed_forward, 48))
        )
    )


@each_model
def test_the_most_important_come_first(name):
    """What a smaller budget keeps is what scored highest: the rest may be anything."""
    case, model, inputs = build(name)
    scores = random_scores(case, model)
    sorted_model = hf_moa.upcycle(model, nested_budgets=[1, 0.5], importance=scores)
    expected = sorted_model(**inputs, budget=0.5).logits
    # zero what scored lowest in the source: half of the budget computes the same
    layout = hf_moa.families.family_of(model.config).layout(model.config)
    prefix = "" if name.startswith("T5") else f"{model.base_model_prefix}."
    with torch.no_grad():
        for layer, found in scores.neurons.items():
            weight = model.get_parameter(f"{prefix}{layer}.{_LAST[case.family.name][1]}.weight")
            axis = 0 if case.family.name == "gpt2" else 1
            weight.movedim(axis, 0)[found.argsort()[:24]] = 0
        for layer, found in scores.heads.items():
            table = layout.table_of(layer)
            if table is not None:
                found = sum(s for n, s in scores.heads.items() if layout.table_of(n) == table)
            weight = model.get_parameter(f"{prefix}{layer}.{_LAST[case.family.name][0]}.weight")
            axis = 0 if case.family.name == "gpt2" else 1
            size = weight.shape[axis] // 4
            for head in found.argsort()[:2].tolist():
                weight.movedim(axis, 0)[head * size : (head + 1) * size] = 0
    torch.testing.assert_close(model(**inputs).logits, expected, atol=1e-10, rtol=0)


def test_bad_scores_are_refused():
    plain = CASE["BertModel"].build_plain()
    scores = random_scores(CASE["BertModel"], plain)
    with pytest.raises(ValueError, match=r"scores of every layer \(got none of \['encoder.layer.0.att"):
        hf_moa.upcycle(plain, importance=Importance({}, scores.neurons))
    few = {name: found[:5] for name, found in scores.neurons.items()}
    with pytest.raises(ValueError, match=r"importance has 5 scores for .*, which has 48 to sort"):
        hf_moa.upcycle(plain, importance=Importance(scores.heads, few))
