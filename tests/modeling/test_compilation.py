"""`torch.compile` of every family and mechanism: one graph, the same results."""

import pytest
import torch
from common import VARIANTS
from families import CASE, each_variant_but


def few_layers(case, fields):
    """Tracing takes its time for each layer. Plain models keep two, and what goes between them."""
    return case.family.one_layer if fields else {}


# without its noise, a noisy router is the other
ALIKE = {"moa-noisy", "moe-noisy"}
# T5's blocks, traced three times, have the parts of the other families'
IN_OTHERS = {"mae-1", "uni-mae", "moe", "mae-gated-gelu", "cct-plain-gated-gelu"}
# the variants that have the parts of all others
RICHEST = {
    "bert": {"mae-2", "mae-cct-relative", "mae-nested", "cct-full-plain", "moa-moe-cct"},
    "gpt2": {"mae-window-3", "mae-nested", "moa-moe-cct"},
    "t5": {"mae-cct", "moa-moe-cct"},
}


@each_variant_but(slow=("gpt2", "t5"), nightly_but=RICHEST, bert=ALIKE, gpt2=ALIKE, t5=ALIKE | IN_OTHERS)
def test_is_captured_as_one_graph(case, fields):
    torch._dynamo.reset()
    model = case.build(**fields, **few_layers(case, fields))
    inputs = case.inputs()
    budgets = [None, 0.5] if model.config.has_cct and case.family.name != "t5" else [None]
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        for budget in budgets:
            # to rounding: eager looks at the mask, and takes faster forms where it is simple
            expected = model(**inputs, budget=budget).logits
            actual = compiled(**inputs, budget=budget).logits
            torch.testing.assert_close(actual, expected)


@pytest.mark.slow
@each_variant_but(
    nightly_but={"bert": {"mae-2", "moe", "moa-moe-cct"}, "gpt2": {"mae-window-3"}, "t5": {"cct-plain"}},
    bert=ALIKE,
    gpt2=ALIKE,
    t5=ALIKE | IN_OTHERS,
)
def test_training_step_is_captured_as_one_graph(case, fields):
    torch._dynamo.reset()
    fixed = {"router_type": "topk", "router_load_loss_coef": 0.0} | case.family.no_dropout
    layers = few_layers(case, fields)
    # grouped products have no float64; gates that normalise three vectors need it
    dtype, error = (torch.float32, 1e-6) if "ffn_type" in fields else (torch.float64, 1e-11)
    gradients = []
    for compiled in (False, True):
        model = case.build(**layers | fields | fixed).train().to(dtype)
        model.set_experts_implementation("grouped_mm")
        if model.config.listed_budgets:
            model.set_budget(model.config.listed_budgets[-1])  # none is drawn
        step = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        torch.manual_seed(1)
        step(**case.inputs(), **case.labels()).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, expected in gradients[0].items():
        limit = error * max(1.0, expected.abs().max().item())
        torch.testing.assert_close(gradients[1][name], expected, atol=limit, rtol=100 * error, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_class", "name"),
    [
        ("BertForMaskedLM", "mae-cct"),
        ("GPT2LMHeadModel", "moa"),
        *(
            pytest.param(model_class, name, marks=pytest.mark.nightly)
            for model_class, names in {
                "BertForMaskedLM": ("mae-1", "moa", "moe"),
                "GPT2LMHeadModel": ("mae-1",),
                "T5ForConditionalGeneration": ("moe", "mae-cct"),
            }.items()
            for name in names
        ),
    ],
)
def test_compiled_model_computes_the_same(model_class, name):
    torch._dynamo.reset()
    case = CASE[model_class]
    model = case.build(**VARIANTS[name], **case.family.one_layer)
    inputs = case.inputs()
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True)
        expected = model(**inputs).logits
        limit = 1e-5 * expected.abs().max().item()
        torch.testing.assert_close(compiled(**inputs).logits, expected, atol=limit, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("model_class", ["BertForMaskedLM", "GPT2LMHeadModel"])
def test_compiles_under_a_default_device(model_class):
    """Dynamo sees each operator through it, and a few methods of tensors not at all."""
    torch._dynamo.reset()
    case = CASE[model_class]
    fields = VARIANTS["moa"] | VARIANTS["cct-plain"] | case.family.one_layer
    model, inputs = case.build(**fields), case.inputs()
    with torch.no_grad(), torch.device("cpu"):
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(**inputs).logits, model(**inputs).logits)
