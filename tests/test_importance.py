"""`importance`: scores are gradients with respect to gates on heads and neurons."""

import pytest
import torch
from families import CASE, LANGUAGE_MODELS
from peft import LoraConfig, get_peft_model

import hf_moa
from hf_moa import importance

# the projection behind the heads, and behind the neurons, of every layer of the tiny models
PROJECTIONS = {
    "bert": {
        f"encoder.layer.{n}{name}": (f"encoder.layer.{n}{name}.output.dense", parts)
        for n in range(2)
        for name, parts in ((".attention", 4), ("", 48))
    },
    "gpt2": {
        f"h.{n}.{name}": (f"h.{n}.{name}.c_proj", parts)
        for n in range(2)
        for name, parts in (("attn", 4), ("mlp", 48))
    },
    "t5": {
        f"{stack}.block.{n}.layer.{m}.{name}": (f"{stack}.block.{n}.layer.{m}.{name}.{last}", parts)
        for stack, names in (
            ("encoder", ("SelfAttention", "DenseReluDense")),
            ("decoder", ("SelfAttention", "EncDecAttention", "DenseReluDense")),
        )
        for n in range(2)
        for m, name in enumerate(names)
        for last, parts in ((("wo", 48) if name == "DenseReluDense" else ("o", 4)),)
    },
}

FORMS = {
    "plain": lambda case: case.build_plain().double(),
    "gated": lambda case: hf_moa.upcycle(case.build_plain().double(), "mha"),
}
each_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def gradients_of_gates(model, family, batch):
    """|dL/dg| of gates g = 1, for each example its own, on all heads and neurons: layer -> [parts]."""
    gates, hooks = {}, []
    size = len(batch["input_ids"])

    def gated(layer, parts):
        gates[layer] = torch.ones(size, 1, parts, 1, dtype=torch.float64, requires_grad=True)

        def multiply(module, inputs):
            (x,) = inputs
            parted = x.reshape(size, -1, parts, x.shape[-1] // parts)
            return ((parted * gates[layer]).reshape(x.shape),)

        return multiply

    for layer, (name, parts) in PROJECTIONS[family].items():
        module = model.base_model.get_submodule(name)
        hooks.append(module.register_forward_pre_hook(gated(layer, parts)))
    loss = model(**batch).loss * size
    for hook in hooks:
        hook.remove()
    found = torch.autograd.grad(loss, list(gates.values()))
    return {name: grad.abs().sum(dim=(0, 1, 3)) for name, grad in zip(gates, found, strict=True)}


def assert_equals(scores, expected):
    found = scores.heads | scores.neurons
    assert found.keys() == expected.keys()
    for name, score in found.items():
        assert score.dtype == torch.float64
        torch.testing.assert_close(score, expected[name], atol=1e-12, rtol=1e-9)


@each_form
@pytest.mark.parametrize(
    "case",
    [*LANGUAGE_MODELS, CASE["BertForQuestionAnswering"], CASE["BertForMultipleChoice"]],
    ids=lambda case: case.plain_name,
)
def test_equals_the_gradient_of_gates(case, form):
    model = form(case)
    batch = case.inputs() | case.labels()
    batch.pop("decoder_input_ids", None)  # made of labels
    scores = importance(model, [batch])
    assert_equals(scores, gradients_of_gates(model, case.family.name, batch))
    assert all(score.unique().numel() > 1 for score in (scores.heads | scores.neurons).values())


@pytest.mark.parametrize("name", ["BertForSequenceClassification", "GPT2ForSequenceClassification"])
def test_does_not_depend_on_how_examples_are_batched(name):
    """Of a loss for each example; shorter ones are padded where they are together."""
    case = CASE[name]
    model = FORMS["plain"](case)
    batch = case.inputs() | case.labels()
    one_by_one = []
    for b, length in enumerate(batch["attention_mask"].sum(dim=1)):
        inputs = {name: batch[name][b : b + 1, :length] for name in ("input_ids", "attention_mask")}
        one_by_one.append(inputs | {"labels": batch["labels"][b : b + 1]})
    single = [gradients_of_gates(model, case.family.name, each) for each in one_by_one]
    expected = {name: sum(each[name] for each in single) for name in single[0]}
    assert_equals(importance(model, [batch]), expected)
    assert_equals(importance(model, one_by_one), expected)


def test_leaves_the_model_as_it_is():
    case = CASE["BertForSequenceClassification"]
    model = FORMS["plain"](case).train()
    model.bert.encoder.layer[0].eval()
    batch = case.inputs() | case.labels()
    with torch.no_grad():
        first = importance(model, [batch])
    modes = [module.training for module in model.modules()]
    assert len(set(modes)) == 2
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_pre_hooks for module in model.modules())
    second = importance(model.requires_grad_(False), [batch])
    for name, score in first.neurons.items():
        assert not score.requires_grad
        assert torch.equal(second.neurons[name], score)


def test_half_precision_is_summed_in_float32():
    case = CASE["BertForSequenceClassification"]
    scores = importance(case.build_plain().bfloat16(), [case.inputs() | case.labels()])
    assert {score.dtype for score in (scores.heads | scores.neurons).values()} == {torch.float32}


def test_cross_attention_that_no_batch_runs_is_not_there():
    case = CASE["GPT2LMHeadModel"]
    model = case.build_plain(add_cross_attention=True)
    batch = case.inputs() | case.labels()
    assert set(importance(model, [batch]).heads) == {"h.0.attn", "h.1.attn"}
    batch["encoder_hidden_states"] = torch.randn(3, 5, 32)
    scores = importance(model, [batch]).heads
    assert set(scores) == {f"h.{n}.{name}" for n in range(2) for name in ("attn", "crossattention")}


def test_bad_input():
    case = CASE["BertForSequenceClassification"]
    model, batch = case.build_plain(), case.inputs()
    with pytest.raises(ValueError, match="labels"):
        importance(model, [batch])
    with pytest.raises(ValueError, match="at least one batch"):
        importance(model, [])
    with pytest.raises(ValueError, match=r"plain model.*mae"):
        importance(hf_moa.upcycle(model, "mae"), [batch | case.labels()])
    with pytest.raises(ValueError, match="merge_and_unload"):
        importance(get_peft_model(model, LoraConfig()), [batch | case.labels()])
    model = case.build_plain()
    with torch.no_grad():
        model.classifier.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match="must be finite"):
        importance(model, [batch | case.labels()])
