"""Export: `torch.export` and transformers' exporters, of the dense path."""

import copy

import pytest
import torch
from common import VARIANTS
from families import CASE, main_output
from transformers.exporters import DynamoConfig, DynamoExporter, OnnxConfig, OnnxExporter
from transformers.exporters.utils import decompose_for_generation
from transformers.integrations.executorch import TorchExportableModuleForDecoderOnlyLM

NAMES = ["mha", "mae-1", "moa", "moe", "cct", "cct-plain"]
CLASSES = [
    "BertForSequenceClassification",
    "T5EncoderModel",
    "GPT2LMHeadModel",
    "T5ForConditionalGeneration",
]
each_variant = pytest.mark.parametrize("name", NAMES)


def inputs_of(case, **sizes):
    inputs = case.inputs(**sizes)
    if case.plain_name in ("GPT2LMHeadModel", "T5ForConditionalGeneration"):
        inputs["use_cache"] = False
    return inputs


def assert_computes(exported, model, inputs):
    expected, actual = main_output(model(**inputs)), main_output(exported(**inputs))
    scale = expected.abs().max().item()
    torch.testing.assert_close(actual, expected, atol=1e-5 * scale, rtol=0)


@pytest.mark.parametrize(
    ("model_class", "name"),
    [
        (CLASSES[0], "cct"),
        *(pytest.param(CLASSES[0], name, marks=pytest.mark.slow) for name in ("mae-1", "moa", "moe")),
        *(pytest.param(CLASSES[0], name, marks=pytest.mark.nightly) for name in ("mha", "cct-plain")),
        *(pytest.param(CLASSES[1], name, marks=pytest.mark.nightly) for name in NAMES),
        *(
            # as steps of generation: all
            pytest.param(
                model_class, name, marks=pytest.mark.slow if name == "moa" else pytest.mark.nightly
            )
            for model_class in CLASSES[2:]
            for name in ("mae-1", "moa", "cct")
        ),
    ],
)
def test_export_with_dynamic_shapes(model_class, name):
    case = CASE[model_class]
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


@pytest.mark.parametrize("name", ["cct", "cct-plain", "cct-biased", "cct-full-plain"])
def test_budget_stays_open_where_it_is_an_input(name):
    case = CASE["BertForSequenceClassification"]
    model, inputs = case.build(**VARIANTS[name]), case.inputs()
    inputs["budget"] = torch.tensor([1, 0.5, 1])
    exported = DynamoExporter().export(model, inputs, config=DynamoConfig())
    inputs["budget"] = torch.tensor([0.5, 1, 0.5])
    assert_computes(exported, model, inputs)


@pytest.mark.slow
@pytest.mark.parametrize("case", [CASE[name] for name in CLASSES[2:]], ids=CLASSES[2:])
@pytest.mark.parametrize(
    "name",
    [
        "mae-1",
        "cct",
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("mha", "moa", "moe", "cct-plain")),
    ],
)
def test_steps_of_generation_export_with_their_caches(case, name):
    """What the gates remember is an input of the exported step, not a constant of it."""
    model = case.build(**VARIANTS[name])

    def steps(seed, length):
        inputs = case.inputs(seed=seed, length=length)
        inputs.pop("decoder_input_ids", None)
        inputs["attention_mask"] = torch.ones_like(inputs["attention_mask"])
        return decompose_for_generation(model, inputs)

    exported = {
        step: DynamoExporter().export(module, inputs, config=DynamoConfig(dynamic=True))
        for step, (module, inputs) in steps(0, 9).items()
    }
    assert set(exported) >= {"prefill", "decode"}
    # of another length, and the second step on the cache that the first one gives
    cache = None
    for step, (module, inputs) in steps(5, 13).items():
        expected = main_output(module(**copy.deepcopy(inputs)))
        if cache is not None:
            inputs["past_key_values"] = cache
        output = exported[step](**inputs)
        torch.testing.assert_close(main_output(output), expected, atol=1e-4, rtol=1e-5)
        cache = output["past_key_values"]


def exported_for_executorch(model, *, strict):
    sizes = {"batch_size": 1, "max_cache_len": 16}
    model.generation_config.update(use_cache=True, cache_implementation="static", cache_config=sizes)
    wrapped = TorchExportableModuleForDecoderOnlyLM(model, **sizes, device="cpu")
    token, position = torch.tensor([[3]]), torch.tensor([0])
    return wrapped.export(input_ids=token, cache_position=position, strict=strict)


@pytest.mark.parametrize("name", ["mha", "moa"])
def test_step_of_the_wrapper_for_executorch_equals_the_forward(name):
    model = CASE["GPT2LMHeadModel"].build(**VARIANTS[name])
    ids = torch.arange(3, 9).unsqueeze(0)
    step = exported_for_executorch(model, strict=False).module()
    with torch.no_grad():
        expected = model(ids).logits
        for position in range(ids.shape[1]):
            place = slice(position, position + 1)
            found = step(input_ids=ids[:, place], cache_position=torch.tensor([position]))
            torch.testing.assert_close(found, expected[:, place], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", ["mae-1", "cct"])
def test_gates_that_remember_are_refused_by_the_wrapper_for_executorch(name, strict):
    """Its cache has keys and values only."""
    model = CASE["GPT2LMHeadModel"].build(**VARIANTS[name])
    with pytest.raises((ValueError, torch._dynamo.exc.Unsupported), match="what gates remember"):
        exported_for_executorch(model, strict=strict)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_class", "name"),
    [
        *((CLASSES[0], name) for name in ("mae-1", "cct")),
        (CLASSES[1], "mae-1"),
        *(
            pytest.param(model_class, name, marks=pytest.mark.nightly)
            for model_class, names in {
                CLASSES[0]: ("mha", "moa", "moe", "cct-plain"),
                CLASSES[1]: ("mha", "cct"),
            }.items()
            for name in names
        ),
    ],
)
def test_onnx_of_encoders(model_class, name):
    case = CASE[model_class]
    model, inputs = case.build(**VARIANTS[name]), inputs_of(case)
    exported = OnnxExporter().export(model, inputs, config=OnnxConfig(dynamic=True))
    assert_computes(exported, model, inputs)
    assert_computes(exported, model, inputs_of(case, batch_size=2, length=13))
