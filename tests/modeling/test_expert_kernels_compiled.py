"""The kernels for GPUs: translated by Triton's compiler, which needs none; run, where there is one."""

import pytest
import torch
from test_expert_linear import choose

from hf_moa.modeling import expert_kernels, expert_linear

pytest.importorskip("triton")


def translate(kernel, dtype, generation, *, num_warps, none, **constants):
    """Compile a kernel to a GPU's machine code; arguments among `none` are None."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    names = kernel.arg_names
    pointers = {"x", "weight", "scale", "bias", "out", "a", "b", "sums"}
    types = {name: f"*{dtype}" if name in pointers else "i32" for name in names}
    types |= {"order": "*i64", "ends": "*i64"}
    constants |= {none: None}
    types |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(
        fn=kernel,
        signature={name: types[name] for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
    )
    target = GPUTarget("cuda", generation, 32)
    return compile(source, target=target, options={"num_warps": num_warps})


@pytest.mark.slow
@pytest.mark.parametrize("generation", [80, 90])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_kernels_compile_for_gpus(dtype, generation, monkeypatch, tmp_path):
    """And within the shared memory that a GPU of any of the last generations has."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    rows, inputs, outputs = expert_kernels._LARGEST_TILES[4 if dtype == "fp32" else 2]
    compiled = []
    for none in ("scale", "bias"):
        compiled.append(
            translate(
                expert_kernels._multiply_rows,
                dtype,
                generation,
                num_warps=8 if rows == 128 else 4,
                none=none,
                X_PER_TOKEN=none == "scale",
                EXPERTS=64,
                PRECISION="ieee",
                BLOCK_ROWS=rows,
                BLOCK_IN=inputs,
                BLOCK_OUT=outputs,
            )
        )
    for none in ("scale", "sums"):
        compiled.append(
            translate(
                expert_kernels._multiply_experts,
                dtype,
                generation,
                num_warps=8 if outputs == 128 else 4,
                none=none,
                PRECISION="ieee",
                BLOCK_ROWS=inputs,
                BLOCK_A=64,
                BLOCK_B=outputs,
            )
        )
    assert all(each.asm["cubin"] for each in compiled)
    assert max(each.metadata.shared for each in compiled) <= 99 * 1024


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernels_on_a_gpu(dtype, monkeypatch):
    monkeypatch.setattr(expert_linear, "computes_by_expert", lambda *_: True)
    torch.manual_seed(0)
    into = expert_linear.ExpertInput(num_experts=16, in_features=256, out_features=64)
    out_of = expert_linear.ExpertOutput(num_experts=16, in_features=64, out_features=256)
    x, weight = torch.randn(2, 300, 256), torch.rand(2, 300, 3)
    index = choose(2, 300, experts=16)
    found = []
    for device, precision in (("cpu", torch.float64), ("cuda", dtype)):
        layers = [layer.to(device, precision) for layer in (into, out_of)]
        inputs = [t.to(device, precision).detach().requires_grad_() for t in (x, weight)]
        y = layers[1](layers[0](inputs[0], index.to(device)), index.to(device), inputs[1])
        parameters = [p for layer in layers for p in layer.parameters()]
        grads = torch.autograd.grad(y.sum(), [*inputs, *parameters])
        found.append([t.double().cpu() for t in (y, *grads)])
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for actual, expected in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(
            actual, expected, rtol=0, atol=tolerance * expected.abs().max().item()
        )
