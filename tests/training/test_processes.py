"""Two processes under DDP, without `find_unused_parameters`: every mechanism and phase."""

from pathlib import Path

import pytest
import torch
from launching import ON_CPU, launch_ranks
from safetensors.torch import load_file
from scenarios import SCENARIOS, SETTINGS, teacher_of
from training_runs import build, gates, run, uneven_rows

pytestmark = pytest.mark.slow
ONE_BATCH = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    launch_ranks(2, HERE / "process_worker.py", folder, *SCENARIOS, environment=ON_CPU)
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
        data=list(uneven_rows(scenario.backbone)) if scenario.uneven else None,
        teacher=teacher_of(scenario),
        **SETTINGS | scenario.arguments | ONE_BATCH,
    )
    compared = gates(model) if scenario.compared == "gates" else model.state_dict()
    for key, tensor in compared.items():
        torch.testing.assert_close(actual[key], tensor, atol=1e-5, rtol=1e-5, msg=key)
