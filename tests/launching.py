"""Other processes for tests: fresh ones, and several on the CPU that train together.

To import torch and transformers takes longer than most tests. So processes are forked from one that has
done so once, except where a test is about imports, `accelerate launch` or `torchrun`.
"""

import faulthandler
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
# where Accelerate is not to ask for a GPU
ON_CPU = {"ACCELERATE_USE_CPU": "true"}
# `accelerate launch --cpu` would start one process.
DATA_PARALLEL = ("--multi_gpu", "--dynamo_backend", "no")

_SERVER = multiprocessing.get_context("forkserver")
# without the package, which some tests go without
_SERVER.set_forkserver_preload(["transformers.trainer_seq2seq", "datasets", "evaluate", "peft"])


def fresh_python(program, *arguments, folder=None, modules_cache=None, timeout=300):
    """Run Python as `python -c TEXT` or `python SCRIPT` does, which may fail; not beside the tests' and
    the examples' modules.

    Args:
        program: a text, or the path of a script.
        folder: where it runs.
        modules_cache: where transformers copies code of checkpoints to.

    Returns:
        The finished process.
    """
    is_script = isinstance(program, Path)
    hidden = ROOT / "tests", ROOT / "examples"
    own = [path for path in sys.path if not any(map(Path(path).resolve().is_relative_to, hidden))]
    settings = {
        "program": str(program) if is_script else None,
        "text": None if is_script else program,
        "arguments": list(map(str, arguments)),
        "variables": dict(os.environ),
        "path": [str(program.parent) if is_script else "", *own],
        "folder": str(folder or Path.cwd()),
        "modules_cache": None if modules_cache is None else str(modules_cache),
    }
    (done,) = _run_all([settings], timeout)
    return done


def launch_ranks(number, script, *arguments, environment=None, timeout=300):
    """Run a script in some processes, which find each other as under `torchrun`.

    Args:
        environment: variables more than this process has.
        timeout: seconds; then the processes say where they are.

    Returns:
        What they print.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    variables |= {"WORLD_SIZE": str(number), "LOCAL_WORLD_SIZE": str(number), **(environment or {})}
    ranks = [
        {
            "program": str(script),
            "arguments": list(map(str, arguments)),
            "variables": variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            "path": [str(Path(script).parent), *sys.path],
            "folder": str(Path.cwd()),
        }
        for rank in range(int(number))
    ]
    finished = _run_all(ranks, timeout)
    codes = [done.returncode for done in finished]
    said = "\n".join(done.stdout[-4000:] + done.stderr[-8000:] for done in finished)
    assert not any(codes), f"exit codes {codes}\n{said}"
    return "".join(done.stdout for done in finished)


def _run_all(all_settings, timeout):
    """Run processes at once, until all have ended or one has failed."""
    with TemporaryDirectory() as folder:
        outputs = [[Path(folder, f"{i}-{name}") for name in "oe"] for i in range(len(all_settings))]
        processes = [
            _SERVER.Process(target=_run_here, args=outputs[i], kwargs=settings)
            for i, settings in enumerate(all_settings)
        ]
        for process in processes:
            process.start()
        try:
            _wait(processes, timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()
        texts = [[output.read_text() if output.is_file() else "" for output in pair] for pair in outputs]
    codes = [process.exitcode for process in processes]
    return [
        subprocess.CompletedProcess(settings["arguments"], code, *pair)
        for settings, code, pair in zip(all_settings, codes, texts, strict=True)
    ]


def _wait(processes, timeout):
    end = time.monotonic() + timeout
    left = list(processes)
    while left and not any(process.exitcode for process in processes):
        if not wait([process.sentinel for process in left], max(0, end - time.monotonic())):
            for process in left:
                os.kill(process.pid, signal.SIGUSR1)
            time.sleep(2)
            return
        left = [process for process in left if process.exitcode is None]


def _run_here(
    stdout, stderr, *, program, arguments, variables, path, folder, text=None, modules_cache=None
):
    for number, output in enumerate((stdout, stderr), start=1):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    sys.argv = [program or "-c", *arguments]
    sys.path[:] = path

    import torch
    from transformers import dynamic_module_utils

    torch.set_num_threads(1)
    if modules_cache is not None:
        dynamic_module_utils.HF_MODULES_CACHE = modules_cache
    if text is None:
        runpy.run_path(program, run_name="__main__")
    else:
        sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(text, "-c", "exec"), sys.modules["__main__"].__dict__)


def accelerate_launch(script, *arguments, how=DATA_PARALLEL, environment=None, timeout=300):
    """Run a script by `accelerate launch` in two processes.

    Args:
        how: options of `accelerate launch`.
        environment: variables more than this process has.
    """
    command = [
        *("accelerate.commands.launch", *how, "--num_processes", "2"),
        *("--main_process_port", "0", "--mixed_precision", "no"),
    ]
    done = _run([*command, script, *arguments], environment or {}, timeout)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    return done.stdout


def torchrun(number, script, *arguments, timeout=300):
    """Run a script that may fail by `torchrun`: the finished process."""
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
