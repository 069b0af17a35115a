"""Activations: the kernels are the functions that transformers writes out."""

import pytest
import torch
from families import CASE, main_output
from transformers.activations import ACT2FN

from hf_moa.modeling.core.activations import build_activation

PLAIN = sorted(set(ACT2FN) - {"prelu", "xielu"})  # these two have parameters


@pytest.mark.parametrize("name", PLAIN)
def test_activations_are_transformers_own(name):
    x = torch.linspace(-12, 12, 4801, dtype=torch.float64)
    found = []
    for activation in (build_activation(name), ACT2FN[name]):
        leaf = x.clone().requires_grad_()
        activation(leaf).sum().backward()
        found.append((activation(x), leaf.grad))
    (value, grad), (expected, expected_grad) = found
    torch.testing.assert_close(value, expected, atol=1e-14, rtol=1e-13)
    torch.testing.assert_close(grad, expected_grad, atol=1e-13, rtol=1e-13)


@pytest.mark.parametrize("name", ["gelu_accurate", "gelu_new", "gelu_python"])
def test_what_is_written_out_becomes_one_kernel(name):
    x = torch.randn(7, requires_grad=True)
    y = build_activation(name)(x)
    assert type(y.grad_fn).__name__ == "GeluBackward0"


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "T5ForConditionalGeneration"])
def test_plain_path_with_the_backbones_own_gelu(name):
    case = CASE[name]
    field = "activation_function" if name.startswith("GPT2") else "feed_forward_proj"
    fields = {field: "gelu_new" if name.startswith("GPT2") else "gated-gelu"}
    reference = case.build_plain(**fields).double()
    model = case.gated(case.config(**fields)).double().eval()
    model.load_state_dict(reference.state_dict())
    inputs = case.inputs()
    expected = main_output(reference(**inputs))
    torch.testing.assert_close(main_output(model(**inputs)), expected, atol=1e-12, rtol=1e-12)
