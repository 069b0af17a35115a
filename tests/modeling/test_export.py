"""Export: `torch.export` and transformers' exporters, of the dense path."""

import pytest
import torch
from common import VARIANTS
from families import CASE, main_output
from transformers.exporters import DynamoConfig, DynamoExporter, OnnxConfig, OnnxExporter

NAMES = ["mha", "mae-1", "moa", "moe", "cct", "cct-plain"]
CLASSES = [
    "BertForSequenceClassification",
    "T5EncoderModel",
    "GPT2LMHeadModel",
    "T5ForConditionalGeneration",
]
each_variant = pytest.mark.parametrize("name", NAMES)
each_class = pytest.mark.parametrize("case", [CASE[name] for name in CLASSES], ids=CLASSES)


def inputs_of(case, **sizes):
    inputs = case.inputs(**sizes)
    if case.plain_name in ("GPT2LMHeadModel", "T5ForConditionalGeneration"):
        inputs["use_cache"] = False
    return inputs


def assert_computes(exported, model, inputs):
    expected, actual = main_output(model(**inputs)), main_output(exported(**inputs))
    scale = expected.abs().max().item()
    torch.testing.assert_close(actual, expected, atol=1e-5 * scale, rtol=0)


@each_class
@each_variant
def test_export_with_dynamic_shapes(case, name):
    model = case.build(**VARIANTS[name])
    exported = DynamoExporter().export(model, inputs_of(case), config=DynamoConfig(dynamic=True))
    assert_computes(exported, model, inputs_of(case))
    assert_computes(exported, model, inputs_of(case, batch_size=2, length=13))


@each_variant
def test_torch_export_of_an_encoder_as_it_stands(name):
    case = CASE["BertForSequenceClassification"]
    model, inputs = case.build(**VARIANTS[name]), case.inputs()
    with torch.no_grad():
        program = torch.export.export(model, (), inputs, strict=False)
        torch.testing.assert_close(program.module()(**inputs).logits, model(**inputs).logits)


@pytest.mark.slow
@pytest.mark.parametrize("case", [CASE[name] for name in CLASSES[:2]], ids=CLASSES[:2])
@pytest.mark.parametrize("name", NAMES)
def test_onnx_of_encoders(case, name, tmp_path):
    model, inputs = case.build(**VARIANTS[name]), inputs_of(case)
    exported = OnnxExporter().export(model, inputs, config=OnnxConfig(dynamic=True))
    assert_computes(exported, model, inputs)
    assert_computes(exported, model, inputs_of(case, batch_size=2, length=13))
