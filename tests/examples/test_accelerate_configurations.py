"""The files for `accelerate launch`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import run_clm_no_trainer
import yaml
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate_runs import log
from script_runs import command_line

EXAMPLES = Path(run_clm_no_trainer.__file__).parent

# What `accelerate launch` makes of each file.
LAUNCHES = {
    "cpu": {"use_cpu": True, "num_processes": 1, "mixed_precision": "no"},
    "one_gpu": {"use_cpu": False, "multi_gpu": False, "num_processes": 1, "mixed_precision": "bf16"},
    "ddp": {"multi_gpu": True, "num_processes": 2, "mixed_precision": "bf16"},
    "ddp_two_nodes": {"multi_gpu": True, "num_machines": 2, "num_processes": 16},
    "fsdp2_two_nodes": {
        "use_fsdp": True,
        "fsdp_version": 2,
        "num_machines": 2,
        "num_processes": 16,
        "use_parallelism_config": True,
        "parallelism_config_dp_replicate_size": 2,
        "parallelism_config_dp_shard_size": 8,
    },
    "fsdp2": {
        "use_fsdp": True,
        "fsdp_version": 2,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_transformer_layer_cls_to_wrap": "MoaGPT2Block",
        "fsdp_cpu_ram_efficient_loading": False,
        "mixed_precision": "bf16",
    },
    "deepspeed_zero3": {
        "use_deepspeed": True,
        "zero_stage": 3,
        "gradient_clipping": 1.0,
        "mixed_precision": "bf16",
    },
}


LAUNCH_KINDS = ("multi_gpu", "use_fsdp", "use_deepspeed")


@pytest.mark.parametrize("path", sorted((EXAMPLES / "accelerate").glob("*.yaml")), ids=lambda p: p.stem)
def test_configurations_are_accelerates(path, monkeypatch):
    assert yaml.safe_load(path.read_text())
    ClusterConfig.from_yaml_file(str(path))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    command = launch_command_parser().parse_args(["--config_file", str(path), "script.py"])
    found = vars(_validate_launch_command(command)[0])
    expected = dict.fromkeys(LAUNCH_KINDS, False) | LAUNCHES[path.stem]
    assert {name: found[name] for name in expected} == expected


@pytest.mark.slow
def test_cpu_configuration_runs_a_script(arguments):
    values = arguments("clm", attention_type="mae", max_train_steps=2, use_cpu=None)
    configuration = EXAMPLES / "accelerate" / "cpu.yaml"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(configuration),
               run_clm_no_trainer.__file__, *command_line(values)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert [entry["step"] for entry in log(values)] == [1, 2]
