"""Batch normalisation of gates: `nn.BatchNorm1d` where all rows count, and its gradients."""

import copy

import pytest
import torch
import torch.distributed as dist
from families import CASE
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.func import jvp
from torch.optim.swa_utils import update_bn

from hf_moa.modeling.mae.mixture import MaeGate
from hf_moa.modeling.mae.norm import GateBatchNorm

ROWS, SIZE = 7, 5


def build():
    torch.manual_seed(0)
    norm = GateBatchNorm(SIZE).double()
    for tensor in [*norm.parameters(), norm.running_mean]:
        nn.init.normal_(tensor)
    nn.init.uniform_(norm.running_var, 0.5, 2)
    return norm


def rows(number=ROWS):
    return torch.randn(number, SIZE, dtype=torch.float64, requires_grad=True)


def reference(norm, x, valid):
    """`nn.BatchNorm1d` by the rows that count, of all rows, in differentiable operations."""
    counted = x[valid] if valid.sum() > 1 else None
    mean = norm.running_mean if counted is None else counted.mean(dim=0)
    var = norm.running_var if counted is None else counted.var(dim=0, unbiased=False)
    return (x - mean) / (var + norm.eps).sqrt() * norm.weight + norm.bias


VALID = {
    "all": [True] * ROWS,
    "some": [True, True, False, True, False, True, True],
    "one": [False, False, True, False, False, False, False],
    "none": [False] * ROWS,
}
each_mask = pytest.mark.parametrize("valid", VALID.values(), ids=VALID)


def test_equals_batch_norm_and_its_statistics():
    norm, x = build(), rows()
    plain = nn.BatchNorm1d(SIZE).double()
    plain.load_state_dict(norm.state_dict())
    torch.testing.assert_close(norm(x), plain(x))
    torch.testing.assert_close(norm.state_dict(), plain.state_dict())


@pytest.mark.parametrize("valid", [*VALID.values(), None], ids=[*VALID, "no mask"])
def test_forward_and_gradients(valid):
    mask = None if valid is None else torch.tensor(valid)
    norm, x = build(), rows()
    twin, gradient = copy.deepcopy(norm), torch.randn(ROWS, SIZE, dtype=torch.float64)
    expected = reference(twin, x, torch.ones(ROWS).bool() if mask is None else mask)
    actual = norm(x, mask)
    torch.testing.assert_close(actual, expected)
    wanted = torch.autograd.grad(expected, [x, *twin.parameters()], gradient)
    got = torch.autograd.grad(actual, [x, *norm.parameters()], gradient)
    torch.testing.assert_close(got, wanted)


@each_mask
def test_first_and_second_derivatives(valid):
    norm, mask = build(), torch.tensor(valid)

    def standardize(x):
        return copy.deepcopy(norm).standardize(x, mask)

    gradcheck(standardize, rows(), check_batched_grad=True)
    gradgradcheck(standardize, rows())


def test_a_single_row_is_normalised_by_the_running_statistics():
    norm, x = build(), rows(1)
    expected = reference(norm, x, torch.tensor([True]))
    state = {name: tensor.clone() for name, tensor in norm.state_dict().items()}
    actual = norm(x)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(norm.state_dict(), state, atol=0, rtol=0)
    (gradient,) = torch.autograd.grad(actual.sum(), x)
    torch.testing.assert_close(gradient[0], norm.weight / (norm.running_var + norm.eps).sqrt())


def test_forward_mode():
    norm, x, direction = build(), rows().detach(), rows().detach()
    mask = torch.tensor(VALID["some"])
    _, tangent = jvp(lambda x: reference(norm, x, mask), (x,), (direction,))
    _, actual = jvp(lambda x: copy.deepcopy(norm)(x, mask), (x,), (direction,))
    torch.testing.assert_close(actual, tangent)


@pytest.mark.parametrize(
    ("training", "hooked"),
    [(True, hooked) for hooked in (None, "dense", "norm", "norm backward")]
    + [(False, hooked) for hooked in (None, "dense", "norm", "dropout")],
)
def test_gate_is_its_norm_and_matrix(training, hooked):
    """In training in one product, or one after the other where something watches one of them."""
    gate = random_gate(hidden=4).double().train(training)
    x, gradient = rows(), torch.randn(ROWS, 3, dtype=torch.float64)
    seen = []
    if hooked == "norm backward":
        gate.norm.register_full_backward_hook(lambda *args: seen.append(0))
    elif hooked:
        getattr(gate, hooked).register_forward_hook(lambda *args: seen.append(0))
    normal = reference(gate.norm, x, torch.full((ROWS,), training))
    logits = gate.out(torch.tanh(gate.dense(normal)))
    learning = [x, *gate.parameters()]
    expected = torch.autograd.grad(logits.softmax(dim=-1), learning, gradient)
    seen.clear()
    actual = gate(x, None, dtype=torch.float64)
    torch.testing.assert_close(actual, logits.softmax(dim=-1))
    torch.testing.assert_close(torch.autograd.grad(actual, learning, gradient), expected)
    assert len(seen) == (hooked is not None)


def test_scale_and_shift_are_the_norm_in_eval():
    norm, x = build().eval(), rows()
    scale, shift = norm.scale_and_shift(torch.float64)
    torch.testing.assert_close(x * scale + shift, norm(x))
    torch.testing.assert_close(x * scale + shift, reference(norm, x, torch.zeros(ROWS).bool()))


def random_gate(*, hidden):
    torch.manual_seed(0)
    gate = MaeGate(hidden_size=SIZE, num_experts=3, gate_hidden_size=hidden, dropout=0.0)
    for tensor in [*gate.parameters(), gate.norm.running_mean]:
        nn.init.normal_(tensor)
    nn.init.uniform_(gate.norm.running_var, 0.5, 2)
    return gate


def test_a_norm_that_is_wrapped_is_called():
    class Wrapper(nn.Module):
        def __init__(self, norm):
            super().__init__()
            self.norm, self.calls = norm, 0

        def forward(self, *args):
            self.calls += 1
            return self.norm(*args)

    gate = MaeGate(hidden_size=SIZE, num_experts=3, gate_hidden_size=4, dropout=0.0).double()
    expected = copy.deepcopy(gate)(rows(), None, dtype=torch.float64)
    torch.manual_seed(0)
    gate.norm = Wrapper(gate.norm)
    gate(rows(), None, dtype=torch.float64)
    assert gate.norm.calls == 1
    assert expected.isfinite().all()


def test_dropout_alone_can_be_in_training():
    gate = MaeGate(hidden_size=SIZE, num_experts=3, gate_hidden_size=64, dropout=0.5).eval()
    nn.init.normal_(gate.out.weight)
    gate.dropout.train()
    x = torch.randn(ROWS, SIZE)
    first, second = (gate(x, None, dtype=torch.float32) for _ in range(2))
    assert not torch.equal(first, second)


def test_a_dropout_that_is_replaced_is_called_in_eval():
    class AlwaysOn(nn.Module):
        def forward(self, x):
            return nn.functional.dropout(x, 0.5)

    gate = random_gate(hidden=64).eval()
    gate.dropout = AlwaysOn()
    x = torch.randn(ROWS, SIZE)
    first, second = (gate(x, None, dtype=torch.float32) for _ in range(2))
    assert not torch.equal(first, second)


def test_keeps_one_tensor_of_its_inputs_size_for_backward():
    held, x = [], rows()
    gate = MaeGate(hidden_size=SIZE, num_experts=3, gate_hidden_size=4, dropout=0.0).double()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t) or t, lambda t: t):
        gate(x, None, dtype=torch.float64)
    large = {t.untyped_storage().data_ptr() for t in held if t.shape == x.shape}
    assert len(large) == 1


def test_statistics_of_averaged_weights_are_those_of_all_batches():
    """`torch.optim.swa_utils.update_bn`, which sets the momentum to None."""
    model = CASE["BertModel"].build(attention_type="mae").double()
    batches = [CASE["BertModel"].inputs(seed=seed)["input_ids"].clamp(min=5) for seed in (1, 2, 3)]
    norms = [module for module in model.modules() if isinstance(module, GateBatchNorm)]
    seen = {norm: [] for norm in norms}
    hooks = [
        norm.register_forward_pre_hook(lambda module, args: seen[module].append(args[0].flatten(0, -2)))
        for norm in norms
    ]
    update_bn(batches, model)
    for hook in hooks:
        hook.remove()
    assert not model.training
    for norm in norms:
        assert (norm.momentum, int(norm.num_batches_tracked)) == (0.1, 3)
        means, variances = zip(*((x.mean(dim=0), x.var(dim=0)) for x in seen[norm]), strict=True)
        torch.testing.assert_close(norm.running_mean, sum(means) / 3)
        torch.testing.assert_close(norm.running_var, sum(variances) / 3)


def test_frozen_statistics_stay_when_others_are_made_anew():
    model = CASE["BertModel"].build(attention_type="mae").requires_grad_(False)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    update_bn([CASE["BertModel"].inputs()["input_ids"]], model)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name]), name


def test_conversion_to_synchronised_statistics_makes_them_global():
    model = CASE["BertModel"].build(attention_type="mae")
    inputs = CASE["BertModel"].inputs()
    expected, keys = model(**inputs).last_hidden_state, list(model.state_dict())
    converted = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    norms = [module for module in converted.modules() if isinstance(module, GateBatchNorm)]
    assert len(norms) == 2
    assert all(norm.is_global for norm in norms)
    assert list(converted.state_dict()) == keys
    assert torch.equal(converted(**inputs).last_hidden_state, expected)


@pytest.fixture
def group_of_one(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_expert_steps_of_the_only_process_of_a_group(group_of_one):
    """DDP waits for gates' gradients in a group of one, too, where the F step has none."""
    model = CASE["BertModel"].build(attention_type="mae").train()
    model.set_mae_phase("expert")
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    for _ in range(2):
        wrapped(**CASE["BertModel"].inputs()).pooler_output.sum().backward()
    gates = [p.grad for name, p in model.named_parameters() if ".gate." in name]
    assert all(gradient is not None and not gradient.any() for gradient in gates)
