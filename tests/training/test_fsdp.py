"""FSDP version 2 on two processes: block coordinate descent, sharded checkpoints, whole models."""

from pathlib import Path

import pytest
import torch
from accelerate.utils import merge_fsdp_weights
from fsdp_worker import MODELS, STANDING
from launching import launch
from safetensors.torch import load_file
from training_runs import CLASSES, build, gates, run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fsdp")
    launch(Path(__file__).parent / "fsdp_worker.py", folder)
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_sharded_checkpoint_loads_whole_in_one_process(name, trained):
    folder = trained / name
    shards = folder / "checkpoint-2" / "pytorch_model_fsdp_0"
    merge_fsdp_weights(str(shards), str(folder), safe_serialization=True)
    case = CLASSES[name.split("-")[0]]
    model, report = case.gated.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    expected = load_file(trained / f"{name}.safetensors")
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[key]), key
    assert torch.isfinite(model(**case.inputs())[0]).all()


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
