"""Several processes on the CPU, for tests of distributed training."""

import os
import subprocess
import sys

# `accelerate launch --cpu` would start one process.
DATA_PARALLEL = ("--multi_gpu", "--dynamo_backend", "no")


def launch(script, *arguments, how=DATA_PARALLEL, environment=None, timeout=300):
    """Run a script in two processes on the CPU.

    Args:
        how: options of `accelerate launch`.
        environment: variables other than those of data parallelism.
    """
    command = [
        *("accelerate.commands.launch", *how, "--num_processes", "2"),
        *("--main_process_port", "0", "--mixed_precision", "no"),
    ]
    variables = {"ACCELERATE_USE_CPU": "true"} if environment is None else environment
    return _succeeded(_run([*command, script, *arguments], variables, timeout))


def launch_ranks(number, script, *arguments, timeout=300):
    """Run a script in some processes on the CPU, as `torchrun` does."""
    return _succeeded(run_ranks(number, script, *arguments, timeout=timeout))


def run_ranks(number, script, *arguments, timeout=300):
    """The same of a script that may fail: the finished process."""
    command = ["torch.distributed.run", "--standalone", "--nproc_per_node", number]
    return _run([*command, script, *arguments], {}, timeout)


def _run(command, variables, timeout):
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([*sys.path, os.environ.get("PYTHONPATH", "")]),
        **variables,
    }
    return subprocess.run(
        [sys.executable, "-m", *map(str, command)],
        env=environment, capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip


def _succeeded(done):
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    return done.stdout
