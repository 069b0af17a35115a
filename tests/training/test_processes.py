"""Two processes under DDP, without `find_unused_parameters`: every mechanism and phase."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from runs import build, gates, run
from safetensors.torch import load_file
from scenarios import SCENARIOS, SETTINGS

HERE = Path(__file__).parent


def launch(script, *arguments, timeout=600):
    """Two processes on the CPU: `accelerate launch --cpu` would start one."""
    environment = os.environ | {
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([*sys.path, os.environ.get("PYTHONPATH", "")]),
    }
    command = [
        *(sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"),
        *("--main_process_port", "0", "--mixed_precision", "no", "--dynamo_backend", "no"),
        *(str(script), *map(str, arguments)),
    ]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    return done.stdout


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    launch(HERE / "process_worker.py", folder, *SCENARIOS)
    return folder


@pytest.mark.parametrize("name", SCENARIOS)
def test_processes_end_with_the_same_model(name, trained, tmp_path):
    """Which the processes check; and, where nothing is drawn, with the model of one process."""
    scenario = SCENARIOS[name]
    actual = load_file(trained / f"{name}.safetensors")
    if scenario.compared == "none":
        return
    model = build(scenario.backbone, **scenario.fields)
    run(
        scenario.backbone,
        model,
        tmp_path,
        per_device_train_batch_size=8,
        **SETTINGS | scenario.arguments,
    )
    compared = gates(model) if scenario.compared == "gates" else model.state_dict()
    for key, tensor in compared.items():
        torch.testing.assert_close(actual[key], tensor, atol=1e-5, rtol=1e-5, msg=key)
