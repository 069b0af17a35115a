"""Batch normalisation of gates: `nn.BatchNorm1d` where all rows count, and its gradients."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.func import jvp

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
