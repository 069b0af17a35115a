"""FSDP version 2 on two processes: block coordinate descent, sharded checkpoints, whole models."""

import re
from pathlib import Path

import pytest
import torch
from accelerate.utils import merge_fsdp_weights
from fsdp_worker import MODELS, STANDING, TAUGHT, teacher_of
from launching import ON_CPU, fresh_python, launch_ranks
from safetensors.torch import load_file
from training_runs import CLASSES, build, gates, run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fsdp")
    launch_ranks(2, Path(__file__).with_name("fsdp_worker.py"), folder, environment=ON_CPU)
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_sharded_checkpoint_loads_whole_in_one_process(name, trained):
    folder = trained / name / "checkpoint-2"
    merge_fsdp_weights(str(folder / "pytorch_model_fsdp_0"), str(folder), safe_serialization=True)
    case = CLASSES[name.split("-")[0]]
    model, report = case.gated.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    expected = load_file(trained / f"{name}.safetensors")
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[key]), key
    assert torch.isfinite(model(**case.inputs())[0]).all()


@pytest.mark.parametrize("name", TAUGHT)
def test_taught_models_are_those_of_one_process(name, trained, tmp_path):
    model = build("bert", **MODELS[name])
    run("bert", model, tmp_path, teacher=teacher_of(name), per_device_train_batch_size=8,
        **TAUGHT[name])  # fmt: skip
    expected = load_file(trained / f"{name}.safetensors")
    for key, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, expected[key], atol=1e-5, rtol=1e-5, msg=key)


_WITHOUT_THE_PACKAGE = """
import sys

sys.modules["hf_moa"] = None  # an import of it fails, as if it were not installed
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
assert type(model).__name__ == "MoaGPT2LMHeadModel", type(model)
"""


@pytest.mark.parametrize("saved", ["whole", "diverging/diverged-0", "gpt2/checkpoint-2"])
def test_configuration_and_code_are_those_of_one_process(saved, trained, tmp_path):
    model = build("gpt2", **MODELS["gpt2"])
    model.config.use_cache = False  # as `Trainer` has it
    model.save_pretrained(tmp_path)
    folder = trained / saved
    names = {path.name for path in tmp_path.iterdir()} - {"model.safetensors"}
    assert names <= {path.name for path in folder.iterdir()}
    assert {path.name for path in folder.glob("*.py")} == {name for name in names if ".py" in name}
    for name in names:
        assert (folder / name).read_text() == (tmp_path / name).read_text(), name
    if "checkpoint" not in saved:
        done = fresh_python(_WITHOUT_THE_PACKAGE, folder, modules_cache=tmp_path / "code")
        assert done.returncode == 0, done.stderr


def test_diverged_run_is_saved_whole(trained):
    expected = "diverged in a G step at step 0 .*The model with the parameters .*diverging/diverged-0"
    for rank in range(2):
        message = (trained / f"message-{rank}").read_text()
        assert re.search(expected, message), message
    folder = trained / "diverging" / "diverged-0"
    assert (folder / "trainer_state.json").is_file()
    model = CLASSES["gpt2"].gated.from_pretrained(folder)
    for key, tensor in build("gpt2", **MODELS["gpt2"]).state_dict().items():
        assert torch.equal(model.state_dict()[key], tensor), key


@pytest.mark.parametrize("name", STANDING)
def test_gate_steps_are_those_of_one_process(name, trained, tmp_path):
    actual = load_file(trained / f"{name}.safetensors")
    model = build("gpt2", **MODELS[name])
    before = gates(model)
    run("gpt2", model, tmp_path, max_steps=2, learning_rate=0.0, per_device_train_batch_size=8)
    for key, tensor in gates(model).items():
        assert not torch.equal(actual[key], before[key]), key
        if name == "gpt2-gates":  # micro-batches have statistics of their own
            torch.testing.assert_close(actual[key], tensor, atol=1e-5, rtol=1e-5, msg=key)
