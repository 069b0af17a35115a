"""A router's kernels, interpreted, against the plain form in float64. They are compiled, and run where
there is a GPU, in `test_fast_choice_compiled.py`."""

import contextlib

import pytest
import torch
from torch._subclasses import FakeTensorMode
from triton_tools import Launcher, interpreted_copy

from hf_moa.modeling.routing import fast_choice, fast_choice_gpu, routers

pytest.importorskip("triton")

SIZES = [(40, 7, 3), (33, 64, 16), (5, 1000, 2), (300, 5, 5), (1, 16, 1)]
sizes = pytest.mark.parametrize("size", SIZES, ids=["x".join(map(str, size)) for size in SIZES])
each_normalizer = pytest.mark.parametrize("detached", [True, False], ids=["detached", "in-the-gradient"])


@pytest.fixture(scope="module")
def interpreted():
    with interpreted_copy(fast_choice_gpu) as module:
        yield module


@pytest.fixture
def by_kernel(interpreted, monkeypatch):
    """Routers choose by the kernels that are interpreted."""
    monkeypatch.setattr(fast_choice, "_choice_computed_by", lambda x: interpreted.OPERATORS)
    monkeypatch.setattr(routers, "chooses_by_kernel", lambda logits: logits.dtype == torch.float32)


def router(size, detached, kind=routers.TopKRouter):
    _, experts, selected = size
    sizes = {"hidden_size": 8, "num_experts": experts, "num_selected": selected}
    return kind(**sizes, detach_normalizer=detached)


def draw(size, dtype):
    tokens, experts, selected = size
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(1, tokens, experts, generator=generator, dtype=torch.float32)
    slope = torch.randn(1, tokens, selected, generator=generator, dtype=torch.float32)
    return logits.to(dtype).requires_grad_(), slope.to(dtype)


@sizes
@each_normalizer
def test_choice_is_the_plain_forms(by_kernel, size, detached):
    found = []
    for dtype in (torch.float32, torch.float64):  # by the kernels; the plain form
        logits, slope = draw(size, dtype)
        routing = router(size, detached).select(logits, None)
        routing.weight.backward(slope)
        found.append((routing.index, routing.weight.double(), logits.grad.double()))
    (index, weight, grad), (plain_index, plain_weight, plain_grad) = found
    assert torch.equal(index, plain_index)
    torch.testing.assert_close(weight, plain_weight, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grad, plain_grad, rtol=1e-5, atol=1e-6)


def test_noise_has_its_gradient(by_kernel):
    """Through the logits that were ranked."""
    noisy = router(SIZES[0], False, routers.NoisyTopKRouter)
    grads = []
    for dtype in (torch.float32, torch.float64):
        noisy = noisy.to(dtype).train()
        x = torch.ones(2, 5, 8, dtype=dtype).cumsum(1)
        torch.manual_seed(0)
        clean, scale = noisy.gate(x), torch.nn.functional.softplus(noisy.noise(x))
        noise = torch.linspace(-2, 2, clean.numel(), dtype=dtype).view(clean.shape)
        weight = noisy.select(clean + noise * scale, None).weight
        parameters = noisy.gate.weight, noisy.noise.weight
        grads.append([g.double() for g in torch.autograd.grad(weight[..., 0].sum(), parameters)])
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


def test_equal_logits_choose_the_first(by_kernel):
    routing = router((1, 6, 3), True).select(torch.zeros(1, 4, 6), None)
    assert routing.index.tolist() == [[[0, 1, 2]] * 4]
    torch.testing.assert_close(routing.weight, torch.full((1, 4, 3), 1 / 3))


def test_a_token_that_is_no_number_has_no_weights_and_an_expert_that_exists(by_kernel):
    logits = torch.zeros(1, 2, 6)
    logits[0, 1, 2] = torch.nan
    routing = router((1, 6, 3), True).select(logits, None)
    assert routing.index.max() < 6
    assert routing.weight[0, 0].isfinite().all()
    assert routing.weight[0, 1].isnan().all()


def test_operators_are_what_compilers_expect(by_kernel):
    (logits, slope), check = draw(SIZES[0], torch.float32), torch.library.opcheck
    operators, logits = fast_choice.choice_operators(), logits[0].detach().requires_grad_()
    check(operators.choose_experts, (logits, 3, True))
    _, index = operators.choose_experts(logits, 3, True)
    check(operators.choose_experts_backward, (slope[0], logits.detach(), index, False))


def test_a_router_is_taken_whole(by_kernel):
    layer = router(SIZES[0], True)
    x = torch.randn(2, 5, 8)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    expected, found = layer(x), compiled(x)
    assert torch.equal(found.index, expected.index)
    torch.testing.assert_close(found.weight, expected.weight)


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_what_runs_around_the_kernels_waits_for_no_number(monkeypatch):
    """On fake tensors of a GPU, which raise where a number is asked for."""
    for kernel in ("_choose", "_choose_backward"):
        monkeypatch.setattr(fast_choice_gpu, kernel, Launcher())
    monkeypatch.setattr(torch.cuda, "device_of", contextlib.nullcontext)
    monkeypatch.setattr(fast_choice, "kernels_run_on", lambda device: True)
    with FakeTensorMode(), torch.device("cuda"):
        logits = torch.empty(2, 9, 12)
        assert fast_choice.chooses_by_kernel(logits)
        assert not fast_choice.chooses_by_kernel(logits.double())
        rows = torch.empty(9, 12)
        weight, index = fast_choice_gpu.choose_experts(rows, 3, True)
        grad = fast_choice_gpu.choose_experts_backward(weight, rows, index, True)
    assert (index.shape, index.dtype) == ((9, 3), torch.int64)
    assert (grad.shape, grad.dtype) == ((9, 12), torch.float32)
