"""Runs a script under DeepSpeed on CPU processes.

    DS_ACCELERATOR=cpu accelerate launch --use_deepspeed ... deepspeed_on_cpu.py SCRIPT ARGUMENTS

DeepSpeed can do this; Accelerate asks for a GPU before it lets it.
"""

import runpy
import sys
from pathlib import Path

import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType

PartialState._prepare_backend = lambda *args, **kwargs: ("gloo", DistributedType.MULTI_GPU)
PartialState.set_device = lambda state: setattr(state, "device", torch.device("cpu"))

if __name__ == "__main__":
    del sys.argv[0]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
