"""MAE (Peng et al. 2020): the collapsed mixture against the sum over experts, gates and phases."""

import copy
import itertools
import math

import pytest
import torch
from common import assert_same_with_gradients, batch, hidden, randomize, tiny_config
from layers import attention_layer, each_backbone
from peft import LoraConfig, PeftModel, get_peft_model
from references import batch_norm, mae_attention, mae_gate

from hf_moa import MoaBertForSequenceClassification, MoaBertModel
from hf_moa.modeling.mae.mixture import dropped_heads, head_weights
from hf_moa.modeling.mae.pooling import windowed_mean


def mae_layer(backbone="bert", **fields):
    return attention_layer(backbone, attention_type="mae", **fields)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("dropped", [1, 2, 3])
@each_backbone
def test_mixture_equals_the_sum_over_experts(backbone, dropped, training):
    layer = mae_layer(backbone, mae_num_dropped_heads=dropped).train(training)
    x, mask = hidden()
    actual, _ = layer(x, mask)
    expected = mae_attention(layer.core, layer.weights, x, mask)
    assert_same_with_gradients(actual[mask], expected[mask], [x, *layer.parameters()])


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("window", [1, 3, 7, None])
@pytest.mark.parametrize("backbone", ["bert-decoder", "gpt2", "t5-decoder"])
def test_causal_mixture_equals_the_sum_over_experts(backbone, window, training):
    layer = mae_layer(backbone, mae_gate_window=window).train(training)
    x, mask = hidden()
    actual, _ = layer(x, mask)
    expected = mae_attention(layer.core, layer.weights, x, mask)
    assert_same_with_gradients(actual[mask], expected[mask], [x, *layer.parameters()])


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("backbone", ["bert-decoder", "gpt2", "t5-decoder"])
def test_cross_attention_is_gated_on_the_decoder_side(backbone, training):
    layer = mae_layer(backbone, cross=True, mae_gate_window=2).train(training)
    x, mask = hidden()
    source, source_mask = hidden(length=5, seed=3)
    actual, _ = layer(x, mask, source, source_mask)
    expected = mae_attention(layer.core, layer.weights, x, mask, source, source_mask)
    assert_same_with_gradients(actual[mask], expected[mask], [x, source, *layer.parameters()])


def test_left_padding_leaves_the_window_alone():
    layer = mae_layer("bert-decoder", mae_gate_window=3).eval()
    x, _ = hidden(batch_size=2)
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[1, :3] = False
    actual, _ = layer(x, mask)
    alone, _ = layer(x[1:, 3:], mask[1:, 3:])
    torch.testing.assert_close(actual[1, 3:], alone[0], atol=1e-12, rtol=0)


def test_recorded_expert_weights_are_the_gate():
    layer = mae_layer(mae_num_dropped_heads=2).eval()
    x, mask = hidden()
    _, record = layer(x, mask)
    expected = mae_gate(x, mask, layer.core.mixture.gate, False, None)
    torch.testing.assert_close(record.expert_weights, torch.stack(list(expected.values())))


@pytest.mark.parametrize(("heads", "dropped"), [(8, 1), (8, 2), (12, 1), (4, 3)])
def test_experts_are_the_subsets_in_lexicographic_order(heads, dropped):
    matrix = dropped_heads(heads, dropped)
    rows = [tuple(row.nonzero().flatten().tolist()) for row in matrix]
    assert rows == list(itertools.combinations(range(heads), dropped))
    assert len(rows) == math.comb(heads, dropped)
    assert rows == sorted(rows)


def test_uniform_gates_weigh_every_head_one():
    for dropped in (1, 2, 5):
        matrix = dropped_heads(8, dropped).double()
        uniform = torch.full((len(matrix),), 1 / len(matrix), dtype=torch.float64)
        weights = head_weights(uniform, matrix, num_dropped=dropped)
        torch.testing.assert_close(weights, torch.ones(8, dtype=torch.float64))


def test_head_weights_keep_their_precision_under_autocast():
    gates = torch.rand(5, 66).softmax(-1)
    matrix = dropped_heads(12, 2)
    expected = head_weights(gates, matrix, num_dropped=2)
    with torch.autocast("cpu", torch.bfloat16):
        actual = head_weights(gates, matrix, num_dropped=2)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, atol=0, rtol=0)


def test_head_weights_sum_to_the_number_of_heads():
    gates = torch.rand(5, 28, dtype=torch.float64).softmax(-1)
    weights = head_weights(gates, dropped_heads(8, 2), num_dropped=2)
    torch.testing.assert_close(weights.sum(-1), torch.full((5,), 8.0, dtype=torch.float64))


def test_uniform_mae_is_multi_head_attention():
    config = tiny_config(attention_type="mae", mae_gate_type="uniform", mae_num_dropped_heads=2)
    model = randomize(MoaBertModel(config)).eval()
    plain = MoaBertModel(tiny_config()).eval()
    plain.load_state_dict(model.state_dict())  # strict: no gate parameters
    ids, mask = batch()
    actual = model(ids, attention_mask=mask, output_expert_weights=True)
    expected = plain(ids, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(actual.last_hidden_state, expected, atol=0, rtol=0)
    assert all(torch.all(weights == 1 / 6) for weights in actual.expert_weights)


def test_windowed_mean_of_a_long_sequence_stays_accurate():
    x = torch.randn(1, 4096, 8, dtype=torch.float64) + 3
    actual = windowed_mean(x.float(), None, 100).double()
    expected = torch.stack([x[:, max(0, t - 99) : t + 1].mean(dim=1) for t in range(4096)], dim=1)
    assert (actual - expected).abs().max() < 1e-4


# --- phases ---------------------------------------------------------------------------------------


def classifier(**fields):
    torch.manual_seed(0)
    fields = {"attention_type": "mae"} | fields
    return randomize(MoaBertForSequenceClassification(tiny_config(**fields))).train()


def step(model, seed=0, **kwargs):
    ids, mask = batch()
    torch.manual_seed(seed)
    model.zero_grad()
    output = model(ids, attention_mask=mask, labels=torch.tensor([0, 1, 2]), **kwargs)
    output.loss.backward()
    return output


def is_gate(name):
    return ".gate." in name


def has_gradient(parameter):
    return parameter.grad is not None and bool(parameter.grad.abs().max() > 0)


def test_gate_phase_gives_gradients_to_gates_alone():
    model = classifier()
    step(model)
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if is_gate(name)}
    model.set_mae_phase("gate")
    step(model)
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad
        if is_gate(name):
            torch.testing.assert_close(parameter.grad, expected[name], atol=0, rtol=0)
        else:
            assert not has_gradient(parameter), name


def test_gate_phase_under_checkpointing_is_the_same():
    model = classifier()
    model.set_mae_phase("gate")
    step(model)
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if is_gate(name)}
    model.activation_checkpointing_enable()
    step(model)
    for name, parameter in model.named_parameters():
        if is_gate(name):
            torch.testing.assert_close(parameter.grad, expected[name], atol=1e-7, rtol=1e-5)
        else:
            assert not has_gradient(parameter), name


def test_gate_phase_rules_replicas_of_data_parallel_too():
    model = classifier()
    model.set_mae_phase("gate")
    step(model)
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    step(_replica_of(model))
    assert {name for name, p in model.named_parameters() if p.grad is not None} == set(expected)
    for name, gradient in expected.items():
        torch.testing.assert_close(model.get_parameter(name).grad, gradient)


def _replica_of(module):
    """What `torch.nn.parallel.replicate` makes for each device."""
    replica = module._replicate_for_data_parallel()
    replica._former_parameters = {}
    for name, child in module._modules.items():
        setattr(replica, name, _replica_of(child))
    for name, parameter in module._parameters.items():
        if parameter is not None:
            replica._former_parameters[name] = parameter.clone()
            setattr(replica, name, replica._former_parameters[name])
    return replica


def test_expert_phase_gives_gates_none():
    model = classifier()
    model.set_mae_phase("expert")
    step(model)
    for name, parameter in model.named_parameters():
        assert has_gradient(parameter) != is_gate(name), name


def test_mixture_phase_trains_everything():
    model = classifier()
    model.set_mae_phase("gate")
    model.set_mae_phase("mixture")
    step(model)
    for name, parameter in model.named_parameters():
        # the last gate bias moves all experts alike only through softmax; all have some gradient
        assert has_gradient(parameter), name


@pytest.mark.parametrize("causal", [False, True])
def test_expert_phase_draws_experts_with_the_gates_probabilities(causal):
    layer = mae_layer("bert-decoder" if causal else "bert").train()
    layer.core.mixture.phase = "expert"
    x, mask = hidden(batch_size=1, length=3)
    weights, drawn = None, torch.zeros(4, dtype=torch.float64)
    torch.manual_seed(0)
    draws = 4000
    for _ in range(draws):
        heads, record = layer.core.mixture.route(x, mask)
        position = heads[0, -1]
        # one expert: its dropped head has weight 0, the others h / (h - 1)
        assert sorted(position.tolist()) == pytest.approx([0, 4 / 3, 4 / 3, 4 / 3])
        drawn[position.argmin()] += 1
        weights = record.expert_weights[0, -1] if causal else record.expert_weights[0]
    deviation = (weights * (1 - weights) / draws).sqrt()
    assert torch.all((drawn / draws - weights).abs() < 4.5 * deviation)


def test_eval_is_always_the_mixture():
    model = classifier().eval()
    ids, mask = batch()
    expected = model(ids, attention_mask=mask).logits
    for phase in ("gate", "expert"):
        model.set_mae_phase(phase)
        torch.testing.assert_close(model(ids, attention_mask=mask).logits, expected, atol=0, rtol=0)


def test_argmax_selection_uses_one_expert_per_layer():
    layer = mae_layer(mae_num_dropped_heads=2).eval()
    x, mask = hidden()
    layer.core.mixture.selection = "argmax"
    heads, record = layer.core.mixture.route(x, mask)
    experts = list(itertools.combinations(range(4), 2))
    for b, g in enumerate(record.expert_weights):
        expected = [0.0 if j in experts[g.argmax()] else 2.0 for j in range(4)]
        assert heads[b, 0].tolist() == pytest.approx(expected)


def test_random_selection_draws_every_expert_alike():
    layer = mae_layer().eval()
    layer.core.mixture.selection = "random"
    x, mask = hidden(batch_size=1)
    torch.manual_seed(0)
    dropped = [int(layer.core.mixture.route(x, mask[:1])[0].argmin()) for _ in range(2000)]
    counts = torch.bincount(torch.tensor(dropped), minlength=4) / 2000
    assert torch.all((counts - 0.25).abs() < 0.05)


def test_selection_changes_eval_and_is_undone():
    model = classifier().eval()
    ids, mask = batch()
    mixture = model(ids, attention_mask=mask).logits
    for selection in ("argmax", "random"):
        model.set_expert_selection(selection)
        assert not torch.equal(model(ids, attention_mask=mask).logits, mixture)
    model.set_expert_selection(None)
    assert torch.equal(model(ids, attention_mask=mask).logits, mixture)


# --- the gate's batch normalisation ---------------------------------------------------------------


def norms(model):
    return [module for name, module in model.named_modules() if name.endswith("gate.norm")]


def test_batch_of_one_uses_and_keeps_the_running_statistics():
    layer = mae_layer().train()
    norm = layer.core.mixture.gate.norm
    before = norm.running_mean.clone(), norm.running_var.clone(), norm.num_batches_tracked.clone()
    x, _ = hidden(batch_size=1)
    mask = torch.ones(1, 7, dtype=torch.bool)
    actual, _ = layer(x, mask)
    expected = mae_attention(layer.core, layer.weights, x, mask)
    torch.testing.assert_close(actual, expected, atol=1e-10, rtol=0)
    after = norm.running_mean, norm.running_var, norm.num_batches_tracked
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one, other)


def test_running_statistics_follow_torch_batch_norm():
    layer = mae_layer().train()
    norm = layer.core.mixture.gate.norm
    reference = torch.nn.BatchNorm1d(32).double()
    reference.load_state_dict(norm.state_dict())
    rows = torch.randn(6, 32, dtype=torch.float64)
    valid = torch.tensor([1, 1, 0, 1, 1, 1], dtype=torch.bool)
    actual = norm(rows, valid)
    torch.testing.assert_close(actual[valid], reference(rows[valid]))
    torch.testing.assert_close(actual[valid], batch_norm(rows[valid], reference, True))
    for name, value in norm.state_dict().items():
        torch.testing.assert_close(value, reference.state_dict()[name])


def test_checkpointing_moves_the_statistics_once():
    plain, checkpointed = classifier(), classifier()
    checkpointed.load_state_dict(plain.state_dict())
    checkpointed.activation_checkpointing_enable()
    for model in (plain, checkpointed):
        step(model, seed=5)
    for one, other in zip(norms(plain), norms(checkpointed), strict=True):
        for name, value in one.state_dict().items():
            assert torch.equal(value, other.state_dict()[name]), name
    for one, other in zip(plain.parameters(), checkpointed.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-7, rtol=1e-5)


def test_frozen_gates_keep_their_statistics():
    model = classifier()
    for name, parameter in model.named_parameters():
        if is_gate(name):
            parameter.requires_grad_(False)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    step(model)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name]), name
    with pytest.raises(ValueError, match="frozen"):
        model.set_mae_phase("gate")


def test_adapter_beside_frozen_gates_reloads_as_it_was(tmp_path):
    base = classifier()
    reference = copy.deepcopy(base).eval()
    model = get_peft_model(base, LoraConfig(task_type="SEQ_CLS", target_modules=["query", "value"]))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    ids, mask = batch()
    for _ in range(5):
        optimizer.zero_grad()
        model(ids, attention_mask=mask, labels=torch.tensor([0, 1, 2])).loss.backward()
        optimizer.step()
    model.eval().save_pretrained(tmp_path)
    expected = model(ids, attention_mask=mask).logits
    plain = reference(ids, attention_mask=mask).logits
    assert not torch.allclose(expected, plain, atol=1e-3)
    loaded = PeftModel.from_pretrained(reference, tmp_path).eval()
    torch.testing.assert_close(loaded(ids, attention_mask=mask).logits, expected)


def test_all_padding_row_stays_out_of_the_statistics():
    model = classifier()
    ids, mask = batch()
    mask[2] = 0
    model(ids, attention_mask=mask)
    fewer = classifier()
    fewer(ids[:2], attention_mask=mask[:2])
    first, other = norms(model)[0], norms(fewer)[0]
    torch.testing.assert_close(first.running_mean, other.running_mean)
    torch.testing.assert_close(first.running_var, other.running_var)


def test_gates_add_three_to_five_percent_at_the_papers_sizes():
    # Transformer-base of the paper: d=512, 8 heads, feed-forward 2048, 6 layers.
    sizes = {
        "vocab_size": 100,
        "hidden_size": 512,
        "num_attention_heads": 8,
        "intermediate_size": 2048,
        "num_hidden_layers": 6,
    }
    counts = {}
    for name, fields in {"mha": {}, "mae": {"attention_type": "mae"}}.items():
        with torch.device("meta"):
            encoder = MoaBertModel(tiny_config(**sizes | fields)).encoder
        counts[name] = sum(parameter.numel() for parameter in encoder.parameters())
    overhead = counts["mae"] / counts["mha"] - 1
    assert 0.03 <= overhead <= 0.05
