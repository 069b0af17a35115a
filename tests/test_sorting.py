"""Importance of heads and neurons, and models sorted by it."""

import pytest
import torch
from families import CASE, CASES
from torch import nn

import hf_moa
from hf_moa.sorting import Importance

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


class Factors(nn.Module):
    """A projection whose inputs are multiplied by one factor for each part, and each example."""

    def __init__(self, linear, number, batch_size):
        super().__init__()
        self.linear = linear
        self.factors = nn.Parameter(torch.ones(batch_size, number, dtype=torch.float64))

    @property
    def weight(self):
        return self.linear.weight

    def forward(self, x):
        parts = x.unflatten(-1, (self.factors.shape[1], -1))
        return self.linear((parts * self.factors[:, None, :, None]).flatten(-2))


@each_model
def test_is_the_gradient_of_a_factor_of_each_head_and_neuron(name):
    case, model, inputs = build(name)
    scores = hf_moa.importance(model, [inputs])
    batch_size = len(inputs["input_ids"])
    assert len(scores.heads) == (6 if name.startswith("T5") else 2)
    for layers, last, number in (
        (scores.heads, _LAST[case.family.name][0], 4),
        (scores.neurons, _LAST[case.family.name][1], 48),
    ):
        for layer, found in layers.items():
            path = f"{layer}.{last}"
            parent, child = path.rsplit(".", 1)
            factors = Factors(model.get_submodule(path), number, batch_size)
            model.get_submodule(parent).register_module(child, factors)
            (gradient,) = torch.autograd.grad(model(**inputs).loss, [factors.factors])
            model.get_submodule(parent).register_module(child, factors.linear)
            expected = gradient.abs().sum(dim=0) * batch_size
            torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


@each_model
def test_adds_up_batches_and_leaves_the_model_as_it_was(name):
    _, model, inputs = build(name)
    model.train()
    model.requires_grad_(False)
    once, twice, some = (
        hf_moa.importance(model, [inputs] * 2, at_most=at_most) for at_most in (1, None, 1024)
    )
    for layer, found in once.heads.items():
        torch.testing.assert_close(twice.heads[layer], 2 * found)
        torch.testing.assert_close(some.heads[layer], 2 * found)
    assert model.training
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


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
            {n: torch.rand(number, generator=generator) for n in layers(names, pattern)}
            for pattern, number in ((layout.attention, 4), (layout.feed_forward, 48))
        )
    )


def layers(names, pattern):
    return hf_moa.pretrained_weights.layers_of(names, pattern)


@each_model
def test_the_most_important_come_first(name):
    """What a smaller budget keeps is what scored highest: the rest may be anything."""
    case, model, inputs = build(name)
    scores = random_scores(case, model)
    sorted_model = hf_moa.upcycle(model, nested_budgets=[1, 0.5], importance=scores)
    expected = sorted_model(**inputs, budget=0.5).logits
    # zero what scored lowest in the source: half of the budget computes the same
    layout = hf_moa.families.family_of(model.config).layout(model.config)
    with torch.no_grad():
        for layer, found in scores.neurons.items():
            weight = model.get_parameter(f"{layer}.{_LAST[case.family.name][1]}.weight")
            axis = 0 if case.family.name == "gpt2" else 1
            weight.movedim(axis, 0)[found.argsort()[:24]] = 0
        for layer, found in scores.heads.items():
            table = layout.table_of(layer)
            if table is not None:
                found = sum(s for n, s in scores.heads.items() if layout.table_of(n) == table)
            weight = model.get_parameter(f"{layer}.{_LAST[case.family.name][0]}.weight")
            axis = 0 if case.family.name == "gpt2" else 1
            size = weight.shape[axis] // 4
            for head in found.argsort()[:2].tolist():
                weight.movedim(axis, 0)[head * size : (head + 1) * size] = 0
    torch.testing.assert_close(model(**inputs).logits, expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], r"batches must hold at least one \(got none\)"),
        ([{"input_ids": torch.ones(1, 3, dtype=torch.long)}], "batches must have labels"),
    ],
)
def test_bad_batches_are_refused(batches, message):
    with pytest.raises(ValueError, match=message):
        hf_moa.importance(CASE["BertForSequenceClassification"].build_plain(), batches)


def test_bad_scores_are_refused():
    plain = CASE["BertModel"].build_plain()
    scores = random_scores(CASE["BertModel"], plain)
    with pytest.raises(ValueError, match=r"scores of every layer \(got none of \['encoder.layer.0.att"):
        hf_moa.upcycle(plain, importance=Importance({}, scores.neurons))
    few = {name: found[:5] for name, found in scores.neurons.items()}
    with pytest.raises(ValueError, match=r"importance has 5 scores for .*, which has 48 to sort"):
        hf_moa.upcycle(plain, importance=Importance(scores.heads, few))
    moe = CASE["BertForSequenceClassification"].build(attention_type="moa")
    with pytest.raises(ValueError, match=r"importance takes a plain model, .* with moa"):
        hf_moa.importance(moe, [])
