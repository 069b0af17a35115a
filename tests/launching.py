"""Two processes on the CPU, for tests of distributed training."""

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
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([*sys.path, os.environ.get("PYTHONPATH", "")]),
        **({"ACCELERATE_USE_CPU": "true"} if environment is None else environment),
    }
    command = [
        *(sys.executable, "-m", "accelerate.commands.launch", *how, "--num_processes", "2"),
        *("--main_process_port", "0", "--mixed_precision", "no"),
        *(str(script), *map(str, arguments)),
    ]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    return done.stdout
