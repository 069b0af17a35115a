"""Runs a script under DeepSpeed on CPU processes.

    DS_ACCELERATOR=cpu accelerate launch --use_deepspeed ... deepspeed_on_cpu.py SCRIPT ARGUMENTS

DeepSpeed can do this; Accelerate asks for a GPU before it lets it.
"""

import faulthandler
import runpy
import sys
from importlib import import_module
from pathlib import Path

import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType

PartialState._prepare_backend = lambda *args, **kwargs: ("gloo", DistributedType.MULTI_GPU)
# Its own all-reduce through shared memory is a minute or more of compiling for each environment, which a
# test has no time for. Without it DeepSpeed asks Gloo. (`deepspeed.comm` has PyTorch as an attribute.)
import_module("deepspeed.comm.torch").build_shm_op = lambda: None
PartialState.set_device = lambda state: setattr(state, "device", torch.device("cpu"))

if __name__ == "__main__":
    faulthandler.dump_traceback_later(500, exit=True)  # before the test's patience ends, to say where
    del sys.argv[0]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
