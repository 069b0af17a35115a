"""Two processes on the CPU, for tests of distributed training."""

import os
import subprocess
import sys


def launch(script, *arguments, timeout=300):
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
