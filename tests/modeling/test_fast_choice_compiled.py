"""A router's kernels: translated by Triton's compiler, which needs no GPU; run, where there is one."""

import pytest
import torch
from test_fast_choice import draw, each_normalizer, router, sizes
from triton_tools import bytes_spilled, translate

from hf_moa.modeling.routing import fast_choice_gpu

pytest.importorskip("triton")


@pytest.mark.slow
@pytest.mark.parametrize("generation", [80, 90])
def test_kernels_compile_for_gpus(generation, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    pointers = dict.fromkeys(("logits", "weight", "grad", "out"), "fp32") | {"index": "i64"}
    for experts, slots in ((16, 12), (128, 16), (1024, 2)):
        tile = fast_choice_gpu._tile_of_logits(torch.empty(1, experts))
        forward = {"SLOTS": slots, "BLOCK_SLOTS": 16}
        backward = {"SLOTS": slots, "DETACHED": True}
        for kernel, constants in (
            (fast_choice_gpu._choose, forward),
            (fast_choice_gpu._choose_backward, backward),
        ):
            compiled = translate(
                kernel, pointers, generation, undivided=["num_rows"], num_warps=4, **constants, **tile
            )
            assert bytes_spilled(compiled, tmp_path) == 0


@pytest.mark.gpu
@sizes
@each_normalizer
def test_kernels_on_a_gpu(size, detached):
    found = []
    for device, dtype in (("cuda", torch.float32), ("cpu", torch.float64)):
        logits, slope = draw(size, dtype)
        logits = logits.detach().to(device).requires_grad_()
        routing = router(size, detached).select(logits, None)
        routing.weight.backward(slope.to(device))
        found.append([t.double().cpu() for t in (routing.index, routing.weight, logits.grad)])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)
