"""Checkpoints carry their code: they load with `trust_remote_code=True` without hf_moa installed."""

import json

import pytest
import torch
from families import CASE, CASES, LANGUAGE_MODELS, each_class, main_output
from launching import fresh_python
from test_pipelines import tokenizer
from transformers import pipeline
from transformers.dynamic_module_utils import get_imports

_WITHOUT_THE_PACKAGE = """
import sys

sys.modules["hf_moa"] = None  # an import of it fails, as if it were not installed
import torch
import transformers

folder, names = sys.argv[1], sys.argv[2:]
inputs, expected, name, lacking = torch.load(f"{folder}/expected.pt")


def check(path):
    model = getattr(transformers, name).from_pretrained(path, trust_remote_code=True)
    assert type(model).__module__.startswith("transformers_modules."), type(model)
    output = model(**inputs)
    logits = output["logits"] if "logits" in output else output[0]
    assert torch.equal(logits, expected)
    return model


model = check(f"{folder}/checkpoint")
for auto_name in names:  # any class of the family, saved again
    other = getattr(transformers, auto_name).from_pretrained(
        f"{folder}/checkpoint", trust_remote_code=True
    )
    other.save_pretrained(f"{folder}/{auto_name}")
    again = getattr(transformers, auto_name).from_pretrained(
        f"{folder}/{auto_name}", trust_remote_code=True
    )
    assert type(again).__name__ == type(other).__name__
    print(auto_name, type(again).__name__)
    if auto_name == name:
        check(f"{folder}/{auto_name}")
try:  # the code of a mechanism that the checkpoint was saved without did not come with it
    getattr(transformers, name).from_pretrained(
        f"{folder}/checkpoint", trust_remote_code=True, **lacking
    )
except ValueError as error:
    (mechanism,) = lacking.values()
    assert f"asks for {mechanism}, and the code that came with this checkpoint" in str(error), error
else:
    raise AssertionError("a mechanism without code")
"""


@pytest.mark.parametrize(
    ("name", "fields", "lacking"),
    [
        pytest.param(
            "BertForMaskedLM",
            {"attention_type": "mae", "ffn_type": "moe"},
            {"attention_type": "moa"},
            id="bert",
        ),
        pytest.param(
            "GPT2ForSequenceClassification",
            {"attention_type": "moa"},
            {"ffn_type": "moe"},
            id="gpt2",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "T5ForConditionalGeneration",
            {"attention_type": "mae", "cct_budgets": [[1, 1], [1, 0.5]]},
            {"attention_type": "moa"},
            id="t5",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_checkpoint_loads_without_the_package(name, fields, lacking, tmp_path):
    case = CASE[name]
    model = case.build(**fields)
    model.save_pretrained(tmp_path / "checkpoint")
    inputs = case.inputs()
    torch.save((inputs, main_output(model(**inputs)), case.auto_name, lacking), tmp_path / "expected.pt")
    family = [other.auto_name for other in CASES if other.family is case.family]
    script = tmp_path / "elsewhere.py"
    script.write_text(_WITHOUT_THE_PACKAGE)
    result = fresh_python(script, tmp_path, *family, folder=tmp_path, modules_cache=tmp_path / "code")
    assert result.returncode == 0, result.stderr[-3000:]
    for other in CASES:
        if other.family is case.family:
            assert f"{other.auto_name} {other.gated.__name__}" in result.stdout
    # and what was saved elsewhere loads with the package's own classes here
    loaded = case.auto.from_pretrained(tmp_path / case.auto_name)
    assert type(loaded) is case.gated
    assert torch.equal(main_output(loaded(**inputs)), main_output(model(**inputs)))


@each_class
def test_auto_map_names_the_family(case, tmp_path):
    case.gated(case.config()).save_pretrained(tmp_path)
    auto_map = json.loads((tmp_path / "config.json").read_text())["auto_map"]
    family = [other for other in CASES if other.family is case.family]
    assert auto_map.keys() == {"AutoConfig", *case.family.config_class.auto_classes}
    assert auto_map.keys() > {other.auto_name for other in family}
    for other in family:
        module, name = auto_map[other.auto_name].split(".")
        assert name == other.gated.__name__
        assert f"class {name}(" in (tmp_path / f"{module}.py").read_text()


@pytest.mark.parametrize("case", LANGUAGE_MODELS, ids=lambda case: case.family.name)
def test_package_is_preferred_where_it_is(case, tmp_path):
    case.build().save_pretrained(tmp_path)
    assert type(case.auto.from_pretrained(tmp_path, trust_remote_code=True)) is case.gated
    assert type(case.auto.from_pretrained(tmp_path)) is case.gated


@pytest.mark.parametrize("case", LANGUAGE_MODELS, ids=lambda case: case.family.name)
def test_config_alone_promises_no_models(case, tmp_path):
    case.config().save_pretrained(tmp_path)
    assert set(json.loads((tmp_path / "config.json").read_text())["auto_map"]) == {"AutoConfig"}


def test_carried_files_import_one_another_alone(tmp_path):
    """Flat, with relative imports of one level: the form that transformers can copy."""
    CASE["T5Model"].build().save_pretrained(tmp_path)
    for path in tmp_path.glob("*.py"):
        for line in path.read_text().splitlines():
            stripped = line.strip()
            assert not stripped.startswith(("from ..", "from . import", "import hf_moa"))
        assert "hf_moa" not in get_imports(path)  # those that must be installed


_BEFORE_THE_PACKAGE = """
import sys

import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
assert type(model).__module__.startswith("transformers_modules."), type(model)

from hf_moa.analysis import analyze
from hf_moa.training import MoaTrainer, MoaTrainingArguments, gate_parameters

gates = gate_parameters(model)
before = [gate.clone() for gate in gates]
texts = [{"input_ids": ids, "labels": ids} for ids in torch.randint(3, 40, (4, 6))]
arguments = MoaTrainingArguments(
    sys.argv[2], max_steps=1, per_device_train_batch_size=4, report_to=[], use_cpu=True
)
trainer = MoaTrainer(model=model, args=arguments, train_dataset=texts)
assert trainer.mae_training == "bcd", trainer.mae_training
trainer.train()
assert gates and any(not torch.equal(old, new) for old, new in zip(before, gates))
found = analyze(model, [{"input_ids": texts[0]["input_ids"][None]}])
assert {name.split("_")[0] for name in found.tables} == {"mae", "cct"}, found.tables.keys()
"""


def test_package_knows_a_checkpoint_that_came_with_its_own_code(tmp_path):
    case = CASE["GPT2LMHeadModel"]
    case.build(attention_type="mae", cct_budgets=[1, 0.5]).save_pretrained(tmp_path / "checkpoint")
    script = tmp_path / "before.py"
    script.write_text(_BEFORE_THE_PACKAGE)
    folders = tmp_path / "checkpoint", tmp_path / "run"
    result = fresh_python(script, *folders, folder=tmp_path, modules_cache=tmp_path / "code")
    assert result.returncode == 0, result.stderr[-3000:]


_PIPELINE = """
import json, sys
from transformers import pipeline

folder, budget = sys.argv[1], float(sys.argv[2])
classify = pipeline("text-classification", folder, trust_remote_code=True, top_k=None)
assert "hf_moa" not in sys.modules
classify.model.set_budget(budget)
print(json.dumps(classify(["a head may be dropped", "which"])))
"""


@pytest.mark.slow
def test_pipeline_of_the_carried_code_answers_as_the_packages(tmp_path):
    case = CASE["BertForSequenceClassification"]
    case.build(attention_type="mae", cct_budgets=[1, 0.5]).save_pretrained(tmp_path)
    tokenizer(case).save_pretrained(tmp_path)
    found = fresh_python(_PIPELINE, tmp_path, 0.5, modules_cache=tmp_path / "code")
    assert found.returncode == 0, found.stderr[-3000:]
    classify = pipeline("text-classification", str(tmp_path), top_k=None, budget=0.5)
    expected = classify(["a head may be dropped", "which"])
    for own, theirs in zip(json.loads(found.stdout.splitlines()[-1]), expected, strict=True):
        assert [each["label"] for each in own] == [each["label"] for each in theirs]
        scores = [each["score"] for each in theirs]
        assert [each["score"] for each in own] == pytest.approx(scores, abs=1e-6)
