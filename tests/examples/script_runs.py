"""Running the example scripts in tests, and reading what they wrote."""

import json
from pathlib import Path

from launching import launch_ranks

# what runs of the scripts on Trainer have in common
ON_TRAINER = {
    "do_train": True,
    "do_eval": True,
    "save_strategy": "no",
    "use_cpu": True,
    "disable_tqdm": True,
}

# of a run that two processes can repeat, of as many samples an update
REPEATABLE = {
    "attention_type": "mae",
    "mae_gate_dropout": 0,
    "mae_training": "joint",  # which draws nothing
    "optim": "sgd",  # Adam makes much of rounding
    "learning_rate": 0.1,
    "per_device_train_batch_size": 4,
    "max_steps": 2,  # of one epoch: in the last batch of it, processes take samples again
    "do_eval": False,
}


def command_line(arguments):
    """`{"a": [1, 2], "b": None}` -> `["--a", "1", "2"]`."""
    args = []
    for name, value in arguments.items():
        if value is not None:
            args += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return args


def read_json(arguments, name):
    return json.loads(Path(arguments["output_dir"], name).read_text(encoding="utf-8"))


def run_sharded(script, arguments):
    """The same run on two processes that shard the model; the arguments that it had."""
    size = arguments["per_device_train_batch_size"] // 2
    halves = {"fsdp_size": 2, "per_device_train_batch_size": size}
    halves = arguments | halves | {"output_dir": f"{arguments['output_dir']}-sharded"}
    launch_ranks(2, script, *command_line(halves))
    return halves


def assert_measured_again(script, module, arguments, name):
    """What two processes that shard a model measure of it after training, one measures of the whole."""
    options = {"optim": "sgd", "attention_type": "mae", "mae_training": "joint"}
    halves = run_sharded(script, arguments | options)
    measured = read_json(halves, "all_results.json")
    again = arguments | {"model_name_or_path": halves["output_dir"], "do_train": False}
    module.main(command_line(again))
    assert read_json(again, "all_results.json")[name] == measured[name]
