"""The kernels for GPUs: translated by Triton's compiler, which needs none; run, where there is one."""

import re

import pytest
import torch
from test_expert_linear import choose
from triton_tools import bytes_spilled, translate

from hf_moa.modeling.moa import fast_products_gpu as expert_kernels
from hf_moa.modeling.moa import projections as expert_linear
from hf_moa.modeling.moa import slots_gpu

pytest.importorskip("triton")


def compiled_for(generation, kernel, dtype, **constants):
    pointers = dict.fromkeys(("x", "weight", "scale", "bias", "out", "a", "b", "sums"), dtype)
    pointers |= {"order": "i64", "ends": "i64"}
    return translate(kernel, pointers, generation, undivided=["num_experts"], **constants)


@pytest.mark.slow
@pytest.mark.parametrize("generation", [80, 90])
@pytest.mark.parametrize("precision", ["bf16", "ieee", "tf32"])
def test_kernels_compile_for_gpus(precision, generation, monkeypatch, tmp_path):
    """For the tensor cores where these know the dtype, with loads ahead of the products, and within the
    shared memory that a GPU of any of the last generations has."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    is_half = precision == "bf16"
    tiles = expert_kernels._LARGEST_TILES[torch.bfloat16 if is_half else torch.float32]
    common = {"PRECISION": "ieee" if is_half else precision}
    dtype = "bf16" if is_half else "fp32"
    compiled = []
    # into the heads, whose matrices are transposed, and out of them
    for none, one, slots in (("scale", "stride_in", 8), ("bias", "stride_out", 1)):
        compiled.append(
            compiled_for(
                generation,
                expert_kernels._multiply_rows,
                dtype,
                **{none: None, one: 1},
                SLOTS=slots,
                EXPERTS=64,
                BLOCK_ROWS=tiles.rows,
                BLOCK_IN=tiles.summed,
                BLOCK_OUT=tiles.columns,
                num_warps=tiles.warps,
                **common,
            )
        )
    for none in ("scale", "sums"):
        compiled.append(
            compiled_for(
                generation,
                expert_kernels._multiply_experts,
                dtype,
                **{none: None},
                SLOTS=8,
                BLOCK_ROWS=tiles.summed,
                BLOCK_A=64,
                BLOCK_B=tiles.columns,
                num_warps=4,
                **common,
            )
        )
    assert all(each.asm["cubin"] for each in compiled)
    assert max(each.metadata.shared for each in compiled) <= 99 * 1024
    for each in compiled:
        assert "cp.async" in each.asm["ptx"]
        assert ("mma" in each.asm["ptx"]) is (precision != "ieee")


@pytest.mark.slow
@pytest.mark.parametrize("generation", [80, 90])
def test_moves_compile_for_gpus(generation, monkeypatch, tmp_path):
    """With loads and stores of 16 bytes, and without spills."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    rows, columns = slots_gpu._slot_tile(64)
    tile = {"BLOCK_ROWS": rows, "BLOCK_WIDTH": columns, "num_warps": 4}
    tile |= {"EXPERTS": 32, "SLOTS": 12, "WIDTH": 64}
    pointers = dict.fromkeys(("every", "x", "scale", "out", "dots"), "bf16") | {"index": "i64"}
    none = {"x": None, "scale": None, "dots": None}
    for kernel, constants in (
        (slots_gpu._pick_rows, none),
        (slots_gpu._pick_rows, {}),
        (slots_gpu._spread_rows, {"scale": None, "BLOCK_SLOTS": 16}),
        (slots_gpu._spread_rows, {"BLOCK_SLOTS": 16}),
    ):
        compiled = translate(kernel, pointers, generation, undivided=["num_rows"], **constants, **tile)
        assert re.search(r"ld\.global\S*\.v4", compiled.asm["ptx"])
        assert re.search(r"st\.global\S*\.v4", compiled.asm["ptx"])
        assert bytes_spilled(compiled, tmp_path) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("autocasts", [False, True])
@pytest.mark.parametrize("execution", ["sparse", "auto"])
def test_kernels_on_a_gpu(execution, dtype, autocasts, monkeypatch):
    """Of the chosen experts, or of all."""
    monkeypatch.setattr(expert_linear, "_FEWEST_MOVED", 0)
    if autocasts and dtype == torch.float32:
        pytest.skip("autocast is to half precision")
    torch.manual_seed(0)
    shared = {"num_experts": 16, "execution": execution}
    into = expert_linear.ExpertInput(in_features=256, out_features=64, **shared)
    out_of = expert_linear.ExpertOutput(in_features=64, out_features=256, **shared)
    x, weight = torch.randn(2, 300, 256), torch.rand(2, 300, 3)
    index = choose(2, 300, experts=16)
    found = []
    for device, precision in (("cpu", torch.float64), ("cuda", torch.float32 if autocasts else dtype)):
        layers = [layer.to(device, precision) for layer in (into, out_of)]
        inputs = [t.to(device, precision).detach().requires_grad_() for t in (x, weight)]
        with torch.autocast(device, dtype, enabled=autocasts and device == "cuda"):
            y = layers[1](layers[0](inputs[0], index.to(device)), index.to(device), inputs[1])
        parameters = [p for layer in layers for p in layer.parameters()]
        grads = torch.autograd.grad(y.sum(), [*inputs, *parameters])
        found.append([t.double().cpu() for t in (y, *grads)])
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for actual, expected in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(
            actual, expected, rtol=0, atol=tolerance * expected.abs().max().item()
        )
