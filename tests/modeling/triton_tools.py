"""What Triton can do without a GPU: interpret kernels, and compile them.

The interpreter of Triton 3.9 computes wrongly in bfloat16: twice a number is not its double.
"""

import importlib
import importlib.util
import re
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy
import pytest
import torch

_SHARED = "hf_moa.modeling.core.gpu_kernels"


@contextmanager
def interpreted_copy(module):
    """A copy of a module, with kernels that are interpreted. Triton decides that when it is imported."""
    with interpreted_copies(module) as (copy,):
        yield copy


@contextmanager
def interpreted_copies(*modules):
    """Copies of several, by one Triton: copies of Triton that live side by side have crashed."""

    def forget():
        loaded = [name for name in sys.modules if name.split(".")[0] == "triton" or name == _SHARED]
        return {name: sys.modules.pop(name) for name in loaded if "_C" not in name}

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        kept = forget()
        copies = []
        for module in modules:
            spec = importlib.util.spec_from_file_location(
                f"{module.__name__}_interpreted", module.__file__
            )
            copies.append(importlib.util.module_from_spec(spec))
            spec.loader.exec_module(copies[-1])
        refuse_other_memory(sys.modules["triton.runtime.interpreter"])
        yield copies
        forget()
        sys.modules.update(kept)


def refuse_other_memory(interpreter):
    """Let kernels read and write only within the tensors that they are called with: elsewhere there
    often is some memory, and nobody notices."""
    executor, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
    given, load, store = executor._init_args_hst, builder.create_masked_load, builder.create_masked_store
    ranges = []

    def note(self, *args):
        found = given(self, *args)
        ranges[:] = [
            (x.untyped_storage().data_ptr(), x.untyped_storage().nbytes())
            for x in (*found[0], *found[1].values())
            if isinstance(x, torch.Tensor)
        ]
        return found

    def check(pointers, mask, size):
        taken = numpy.broadcast_to(mask.data, pointers.data.shape).astype(bool)
        places = pointers.data[taken].astype(numpy.int64)
        inside = numpy.zeros(places.shape, dtype=bool)
        for start, length in ranges:
            inside |= (places >= start) & (places + size <= start + length)
        if not inside.all():
            raise IndexError(f"{(~inside).sum()} of {places.size} places are in no tensor of the call")

    def checked_load(self, pointers, mask, *args):
        check(pointers, mask, pointers.get_element_ty().primitive_bitwidth // 8)
        return load(self, pointers, mask, *args)

    def checked_store(self, pointers, value, mask, *args):
        check(pointers, mask, pointers.get_element_ty().primitive_bitwidth // 8)
        return store(self, pointers, value, mask, *args)

    executor._init_args_hst = note
    builder.create_masked_load, builder.create_masked_store = checked_load, checked_store


def translate(kernel, pointers, generation, *, num_warps, num_stages=3, undivided=(), **constants):
    """Compile a kernel to a GPU's machine code, as the launch of aligned tensors would.

    Args:
        pointers: the type of what tensors hold, by the argument's name; of other arguments it is i32.
        generation: of the GPU.
        undivided: numbers that may be of any size; others are multiples of 16.
        constants: arguments that the compiler knows: constants, None, and numbers that are 1.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    names = kernel.arg_names
    types = {name: f"*{pointers[name]}" if name in pointers else "i32" for name in names}
    types |= {"dropout": "fp32"} | dict.fromkeys(constants, "constexpr")
    source = ASTSource(
        fn=kernel,
        signature={name: types[name] for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={
            (i,): [["tt.divisibility", 16]]
            for i, name in enumerate(names)
            if name not in (*constants, *undivided, "dropout")
        },
    )
    target = GPUTarget("cuda", generation, 32)
    return compile(source, target=target, options={"num_warps": num_warps, "num_stages": num_stages})


def bytes_spilled(compiled, folder):
    """What a thread keeps in memory, since it has no registers left."""
    import triton

    folder.joinpath("kernel.cubin").write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    command = [tool, "-res-usage", folder / "kernel.cubin"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(re.search(r"STACK:(\d+)", done.stdout).group(1))


def convert(argument, dtype):
    """A tensor of real numbers in another dtype, also of those in a list or tuple; all else as it is."""
    if isinstance(argument, (list, tuple)):
        return type(argument)(convert(each, dtype) for each in argument)
    is_real = isinstance(argument, torch.Tensor) and argument.is_floating_point()
    return argument.to(dtype) if is_real else argument


def in_float32(function):
    """For a layer in float64, which the kernels do not know."""
    return lambda *args: convert(function(*convert(args, torch.float32)), torch.float64)


class Launcher:
    """In the place of a kernel: `kernel[grid](...)`."""

    def __getitem__(self, grid):
        return lambda *args, **kwargs: None
