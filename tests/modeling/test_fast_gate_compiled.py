"""The causal gate's kernels: translated by Triton's compiler, and run where there is a GPU."""

import pytest
import torch
from families import CASE
from triton_tools import bytes_spilled, translate

from hf_moa.modeling.mae import fast_gate_gpu, mixture

JITFunction = pytest.importorskip("triton").JITFunction
FIELDS = {"attention_type": "mae", "mae_gate_dropout": 0.0, "mae_gate_hidden_size": 16}


@pytest.mark.slow
@pytest.mark.parametrize("generation", [80, 90])
@pytest.mark.parametrize("padding", [False, True])
def test_kernels_compile_for_gpus(generation, padding, monkeypatch, tmp_path):
    """For the tensor cores, within registers, and within the shared memory that a GPU of any of the last
    generations has."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    halves = "features", "weight", "bias", "active", "grad_logits", "grad_means", "x", "out"
    floats = "gates", "counts", "averages", "squares", "numbers", "grad_averages", "grad_squares"
    pointers = dict.fromkeys(floats, "fp32") | dict.fromkeys(halves, "bf16")
    pointers |= {"valid": "u8", "kept": "u8"}
    sizes = {"HIDDEN": 256, "EXPERTS": 16, "BLOCK": fast_gate_gpu.BLOCK, "num_warps": 8}
    tiles = {"COLUMNS": 64, "BLOCK": fast_gate_gpu.BLOCK} | ({} if padding else {"valid": None})
    settings = {
        "_window_gates": sizes | ({"num_stages": 2} if padding else {"num_stages": 2, "valid": None}),
        "_gates_backward": sizes,
        "_window_moments": tiles | {"num_warps": 8},
        "_moments_backward": tiles | {"num_warps": 8},
        "_spread_over_window": tiles | {"num_warps": 4},
    }
    kernels = {name for name, each in vars(fast_gate_gpu).items() if isinstance(each, JITFunction)}
    assert kernels == {"_mean_of_window", *settings}
    undivided = "length", "held", "window", "num_experts", "num_rows"
    for name, constants in settings.items():
        grad = {"grad": "bf16" if name == "_spread_over_window" else "fp32"}
        kernel = vars(fast_gate_gpu)[name]
        compiled = translate(kernel, pointers | grad, generation, undivided=undivided, **constants)
        assert "mma" in compiled.asm["ptx"], name
        assert compiled.metadata.shared <= 99 * 1024, name
        assert bytes_spilled(compiled, tmp_path) == 0, name


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "T5ForConditionalGeneration"])
def test_on_a_gpu(name, compiled, training, dtype, monkeypatch):
    """Both forms are as close to float64."""
    fields = FIELDS | CASE[name].family.no_dropout | {"mae_gate_window": 4}
    inputs = {key: x.cuda() for key, x in (CASE[name].inputs() | CASE[name].labels()).items()}
    found = []
    for form, precision in (("plain", torch.float64), ("plain", dtype), ("fast", dtype)):
        with monkeypatch.context() as patch:
            if form == "plain":
                patch.setattr(mixture, "is_fast", lambda *args: False)
            model = CASE[name].build(**fields).to("cuda", precision).train(training)
            torch.compiler.reset()
            output = (torch.compile(model) if compiled else model)(**inputs)
            output.loss.backward()
            gates = {n: p.grad for n, p in model.named_parameters() if "mixture.gate" in n}
        found.append([t.double() for t in (output.logits, *gates.values())])
    exact, plain, fast = found
    for e, p, f in zip(exact, plain, fast, strict=True):
        largest = e.abs().max()
        assert (f - e).abs().max() <= 2 * (p - e).abs().max() + 4 * torch.finfo(dtype).eps * largest
