"""Runs a script under DeepSpeed on CPU processes.

    DS_ACCELERATOR=cpu accelerate launch --use_deepspeed ... deepspeed_on_cpu.py SCRIPT ARGUMENTS

DeepSpeed can do this; Accelerate asks for a GPU before it lets it.
"""

import faulthandler
import runpy
import sys
from pathlib import Path

import deepspeed.comm.torch as deepspeed_comm
import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType

PartialState._prepare_backend = lambda *args, **kwargs: ("gloo", DistributedType.MULTI_GPU)
# Its own all-reduce through shared memory is compiled at the first run, and waits by spinning: with
# fewer cores than processes it can wait for minutes. Without it DeepSpeed asks Gloo.
deepspeed_comm.build_shm_op = lambda: None
PartialState.set_device = lambda state: setattr(state, "device", torch.device("cpu"))

if __name__ == "__main__":
    faulthandler.dump_traceback_later(200, exit=True)  # before the test's patience ends, to say where
    del sys.argv[0]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
