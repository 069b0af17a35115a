"""Projections of the chosen experts: every form is the same function, with the same gradients."""

import itertools

import pytest
import torch
from torch.autograd import gradcheck
from torch.utils.flop_counter import FlopCounterMode

from hf_moa.modeling.core.operators import library_name
from hf_moa.modeling.moa import fast_products as expert_products
from hf_moa.modeling.moa import fast_products_cpu as expert_loop
from hf_moa.modeling.moa import projections as expert_linear
from hf_moa.modeling.moa.projections import ExpertInput, ExpertOutput

N, K, WIDE, NARROW = 9, 3, 12, 5


@pytest.fixture(params=["by expert", "in small pieces", "by slot"])
def form(request, monkeypatch):
    """A fast form; those of small sizes are asked for."""
    if request.param == "in small pieces":
        monkeypatch.setattr(expert_loop, "_ROWS", 4)
    return request.param


def choose(batch, length, *, experts=N, seed=0):
    """Expert 1 is chosen by no token."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(batch, length, experts, generator=generator)
    scores[..., 1] = -1
    return scores.topk(K, dim=-1).indices


def batch_and_length(form):
    return (1, 1) if form == "by slot" else (2, 11)


def layers(dtype=torch.float64, form="by expert", bias=True):
    torch.manual_seed(0)
    shared = {"num_experts": N, "bias": bias, "execution": "auto" if form == "by slot" else "sparse"}
    into = ExpertInput(in_features=WIDE, out_features=NARROW, **shared)
    out_of = ExpertOutput(in_features=NARROW, out_features=WIDE, **shared)
    for parameter in [*into.parameters(), *out_of.parameters()]:
        torch.nn.init.normal_(parameter)
    return into.to(dtype), out_of.to(dtype)


@pytest.mark.parametrize("bias", [True, False])
def test_input_equals_each_experts_own_product(form, bias):
    layer, _ = layers(form=form, bias=bias)
    batch, length = batch_and_length(form)
    x, index = torch.randn(batch, length, WIDE, dtype=torch.float64), choose(batch, length)
    expected = torch.einsum("bti,btkoi->btko", x, layer.weight[index])
    expected = expected + layer.bias[index] if bias else expected
    with torch.no_grad():
        torch.testing.assert_close(layer(x, index), expected)


@pytest.mark.parametrize("bias", [True, False])
def test_all_experts_need_no_index(bias):
    """In their order; outputs and gradients."""
    index = torch.arange(N).expand(2, 3, N)
    found = []
    for given in (index, None):
        into, out_of = layers(bias=bias)
        torch.manual_seed(1)
        x = torch.randn(2, 3, WIDE, dtype=torch.float64, requires_grad=True)
        weight = torch.rand(2, 3, N, dtype=torch.float64, requires_grad=True)
        heads = into(x, given)
        y = out_of(heads.sin(), given, weight)
        learning = [x, weight, *into.parameters(), *out_of.parameters()]
        found.append([heads, y, *torch.autograd.grad(y.cos().sum(), learning)])
    torch.testing.assert_close(*found)
    for layer, given in ((into, x), (out_of, heads)):
        assert layer.count_macs(given, None) == layer.count_macs(given, index)


@pytest.mark.parametrize("bias", [True, False])
def test_output_equals_the_sum_over_the_experts(form, bias):
    _, layer = layers(form=form, bias=bias)
    batch, length = batch_and_length(form)
    index = choose(batch, length)
    x = torch.randn(*index.shape, NARROW, dtype=torch.float64)
    scale = torch.rand(index.shape, dtype=torch.float64)
    expected = torch.einsum("btki,btkio,btk->bto", x, layer.weight[index], scale)
    expected = expected + layer.bias if bias else expected
    with torch.no_grad():
        torch.testing.assert_close(layer(x, index, scale), expected)


@pytest.mark.parametrize("execution", ["dense", "sparse", "auto"])  # auto: by slot
def test_experts_of_other_processes_give_nothing(execution):
    """Nor get a gradient, with several of them in a token, or nothing else."""
    layers_of_all = layers()
    for layer in layers_of_all:
        layer.num_ranks, layer.moa_execution = 2, execution
    index = choose(2, 6, experts=2 * N)
    index[0, 0] = torch.arange(N, N + K)
    own = index.where(index < N, N)
    x = torch.randn(2, 6, WIDE, dtype=torch.float64)
    scale = torch.rand(index.shape, dtype=torch.float64)
    into, out_of = layers_of_all
    if execution == "auto":
        for token in range(6):
            part = (slice(1), slice(token, token + 1))
            with torch.no_grad():
                heads = into(x[part], own[part])
                torch.testing.assert_close(heads, in_all(into, x, index)[part])
                assert expert_linear.computes_by_slot(own[part], into.weight, "auto", 2)
                every = out_of_all(out_of, heads, index[part], scale[part])
                torch.testing.assert_close(out_of(heads, own[part], scale[part]), every)
        return
    leaves = [x, scale, *into.parameters(), *out_of.parameters()]
    grads = []
    for leaf in leaves:
        leaf.requires_grad_()
    for is_expected in (False, True):
        heads = in_all(into, x, index) if is_expected else into(x, own)
        y = out_of_all(out_of, heads, index, scale) if is_expected else out_of(heads, own, scale)
        loss = (heads.square().sum() + y.square().sum()).sqrt()
        grads.append([heads, y, *torch.autograd.grad(loss, leaves)])
    torch.testing.assert_close(*grads)


def in_all(layer, x, index):
    """`ExpertInput` of twice as many experts, the others' matrices being zero."""
    weight = torch.cat([layer.weight, torch.zeros_like(layer.weight)])
    bias = torch.cat([layer.bias, torch.zeros_like(layer.bias)])
    return torch.einsum("bti,btkoi->btko", x, weight[index]) + bias[index]


def out_of_all(layer, x, index, scale):
    """`ExpertOutput` of them."""
    weight = torch.cat([layer.weight, torch.zeros_like(layer.weight)])
    return torch.einsum("btki,btkio,btk->bto", x, weight[index], scale) + layer.bias


@pytest.mark.parametrize("rows", [4, 512])
def test_gradients(rows, monkeypatch):
    monkeypatch.setattr(expert_loop, "_ROWS", rows)
    into, out_of = layers()
    index = choose(2, 6).flatten(0, 1)
    x = torch.randn(len(index), WIDE, dtype=torch.float64, requires_grad=True)
    gradcheck(
        lambda *args: expert_products.expert_input(args[0], index, *args[1:]), (x, *into.parameters())
    )
    heads = torch.randn(*index.shape, NARROW, dtype=torch.float64, requires_grad=True)
    scale = torch.rand(index.shape, dtype=torch.float64, requires_grad=True)
    gradcheck(
        lambda *args: expert_products.expert_output(args[0], index, *args[1:]),
        (heads, scale, out_of.weight),
    )


def test_operators_are_what_compilers_expect():
    into, out_of = layers()
    index = choose(2, 6).flatten(0, 1)
    x = torch.randn(len(index), WIDE, dtype=torch.float64, requires_grad=True)
    heads = torch.randn(*index.shape, NARROW, dtype=torch.float64, requires_grad=True)
    scale = torch.rand(index.shape, dtype=torch.float64, requires_grad=True)
    operators, check = expert_products.operators(), torch.library.opcheck
    check(operators.expert_groups, (index, N))
    groups = list(operators.expert_groups(index, N))
    check(operators.expert_input, (x, index, groups, into.weight, into.bias))
    check(operators.expert_input, (x, index, groups, into.weight, None))
    transposed = torch.randn(WIDE, len(index), dtype=torch.float64, requires_grad=True).T
    check(operators.expert_input, (transposed, index, groups, into.weight, into.bias))
    check(operators.expert_output, (heads, index, groups, scale, out_of.weight))
    for needs in itertools.product((True, False), repeat=3):
        grad = torch.randn(*index.shape, NARROW, dtype=torch.float64)
        check(
            operators.expert_input_backward,
            (grad, x.detach(), index, groups, into.weight.detach(), *needs),
        )
        if needs[2]:
            tensors = (x.detach(), heads.detach(), index, groups, scale.detach(), out_of.weight.detach())
            check(operators.expert_output_backward, (*tensors, *needs[:2]))


@pytest.mark.parametrize("frozen", ["input", "output", "inputs of both"])
def test_gradients_that_nobody_asks_for_are_not_computed(frozen):
    into, out_of = layers()
    index = choose(2, 6).flatten(0, 1)
    x = torch.randn(len(index), WIDE, dtype=torch.float64, requires_grad=True)
    scale = torch.rand(index.shape, dtype=torch.float64, requires_grad=True)

    def run():
        heads = expert_products.expert_input(x, index, into.weight, into.bias)
        with FlopCounterMode(display=False) as counter:
            expert_products.expert_output(heads, index, scale, out_of.weight).sum().backward()
        return counter.get_total_flops()

    products = 2 * index.numel() * WIDE * NARROW
    assert run() == 5 * products
    # backward goes through both: of each, what is frozen takes no product
    if frozen == "input":
        into.requires_grad_(False)
    elif frozen == "output":
        out_of.requires_grad_(False)
    else:
        x.requires_grad_(False)
    assert run() == 4 * products


def test_versions_of_the_code_do_not_meet():
    """A checkpoint may carry older operators of the same names."""

    name = library_name(expert_products._SCHEMAS)
    assert name == expert_products._LIBRARY
    others = {**expert_products._SCHEMAS, "expert_input": "(Tensor x) -> Tensor"}
    assert library_name(others) != name


def test_lengths_stay_open_in_a_compiled_graph():
    into, out_of = layers()
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    function = torch.compile(
        lambda x, index, scale: out_of(into(x, index), index, scale), backend=count, dynamic=True
    )
    for length in (11, 13, 17):
        index = choose(2, length)
        x = torch.randn(2, length, WIDE, dtype=torch.float64)
        scale = torch.rand(index.shape, dtype=torch.float64)
        torch.testing.assert_close(function(x, index, scale), out_of(into(x, index), index, scale))
    assert len(graphs) == 1


def test_half_precision_is_rounded_once():
    """Sums over slots are kept in float32: the error is that of one rounding."""
    _, exact = layers()
    _, layer = layers(torch.bfloat16)
    exact.load_state_dict(layer.state_dict())
    index = choose(2, 200)
    x = torch.randn(*index.shape, NARROW, dtype=torch.bfloat16)
    scale = torch.ones(index.shape, dtype=torch.bfloat16)
    with torch.no_grad():
        actual, expected = layer(x, index, scale), exact(x.double(), index, scale.double())
    assert actual.dtype == torch.bfloat16
    # products are rounded to bfloat16 before they are summed: 3 of them, and the sum with the bias
    torch.testing.assert_close(actual.double(), expected, rtol=2**-6, atol=2**-5)


def test_autocast_computes_in_its_dtype(form):
    into, out_of = layers(torch.float32, form)
    batch, length = batch_and_length(form)
    index = choose(batch, length)
    x = torch.randn(batch, length, WIDE)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        heads = into(x, index)
        y = out_of(heads, index, torch.rand(index.shape))
    assert heads.dtype == torch.bfloat16
    expected = torch.einsum("bti,btkoi->btko", x, into.weight[index]) + into.bias[index]
    torch.testing.assert_close(heads.float(), expected, rtol=0.05, atol=0.1)
    assert y.dtype in (torch.bfloat16, torch.float32)  # the bias is float32


@pytest.mark.parametrize(
    ("tokens", "experts", "selected", "dtype", "by_expert"),
    [
        (2048, 64, 8, torch.float32, True),
        (2048, 8, 8, torch.float32, False),  # all are chosen anyway
        (8, 64, 8, torch.float32, False),  # too few rows for each expert
        (2048, 64, 8, torch.bfloat16, True),
        (2048, 16, 8, torch.bfloat16, False),
    ],
)
def test_form_is_chosen_by_size(tokens, experts, selected, dtype, by_expert):
    index = torch.zeros(1, tokens, selected, dtype=torch.long)
    weight = torch.empty(experts, 64, 512, dtype=dtype)
    assert expert_linear.computes_by_expert(index, weight) is by_expert
    torch._dynamo.reset()
    compiled = torch.compile(expert_linear.computes_by_expert, fullgraph=True, backend="eager")
    assert compiled(index, weight) is by_expert
    assert not expert_linear.computes_by_expert(index.to("meta"), weight.to("meta"))


def test_one_token_is_computed_by_slot_in_inference_only():
    index = torch.zeros(1, 1, 8, dtype=torch.long)
    weight = torch.empty(64, 64, 512)
    assert not expert_linear.computes_by_slot(index, weight)
    with torch.no_grad():
        assert expert_linear.computes_by_slot(index, weight)
        assert not expert_linear.computes_by_slot(index, weight[:16])
        assert not expert_linear.computes_by_slot(index.expand(1, 2, 8), weight)


def test_forward_mode_is_dense():
    """The operators have no formula for it."""
    index = torch.zeros(1, 2048, 8, dtype=torch.long)
    weight = torch.empty(64, 64, 512)
    seen = []

    def function(x):
        seen.append(expert_linear.computes_by_expert(index, weight))
        return x

    torch.func.jvp(function, (torch.ones(1),), (torch.ones(1),))
    assert seen == [False]
    compiled = torch.compile(torch.func.vmap(function), fullgraph=True, backend="eager")
    compiled(torch.ones(1))
    assert seen == [False, False]
    assert expert_linear.computes_by_expert(index, weight)


def test_transforms_may_map_over_only_the_choice():
    _, out_of = layers()
    index = torch.stack([choose(2, 5), choose(2, 5, seed=1)])
    x, scale = torch.randn(2, 5, K, NARROW).double(), torch.rand(2, 5, K).double()
    mapped = torch.func.vmap(lambda index: out_of(x, index, scale))(index)
    torch.testing.assert_close(mapped, torch.stack([out_of(x, each, scale) for each in index]))


@pytest.mark.slow
def test_matrices_of_any_layout_have_gradients_in_compiled_graphs():
    """The graph relies on the layout that an operator's gradients are said to have."""
    index, scale, grads = choose(2, 11), torch.rand(2, 11, K), []
    into, out_of = layers(torch.float32)
    for layer in (into, out_of):
        data = layer.weight.data.transpose(1, 2).contiguous().transpose(1, 2)
        layer.weight = torch.nn.Parameter(data)

    def function(x):
        return out_of(into(x, index), index, scale)

    x = torch.randn(2, 11, WIDE)
    for run in (function, torch.compile(function, fullgraph=True)):
        grads.append(torch.autograd.grad(run(x).square().sum(), [into.weight, out_of.weight]))
    torch.testing.assert_close(grads[1], grads[0])


def test_graph_that_does_not_know_how_many_tokens_there_are_is_dense():
    into = ExpertInput(num_experts=64, in_features=512, out_features=64)

    @torch.compile(fullgraph=True, backend="eager")
    def function(x, index, kept):
        return into(x[kept][None], index[kept][None])

    x, index, kept = torch.randn(2048, 512), choose(1, 2048, experts=64)[0], torch.rand(2048) < 0.5
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), torch.no_grad():
        torch.testing.assert_close(function(x, index, kept), into(x[kept][None], index[kept][None]))


@pytest.mark.slow
def test_compiles_to_one_graph():
    into, out_of = layers(torch.float32)
    index = choose(2, 11)

    def function(x, scale):
        return out_of(into(x, index), index, scale)

    x = torch.randn(2, 11, WIDE, requires_grad=True)
    scale = torch.rand(index.shape, requires_grad=True)
    grads = []
    for run in (function, torch.compile(function, fullgraph=True)):
        y = run(x, scale)
        inputs = (x, scale, *into.parameters(), *out_of.parameters())
        grads.append([y, *torch.autograd.grad(y.square().sum(), inputs)])
    torch.testing.assert_close(grads[1], grads[0])
