"""CCT (Bapna et al. 2020): gates, execution, costs, budgets and the budget loss."""

import pytest
import torch
from common import (
    assert_same_with_gradients,
    batch,
    hidden,
    randomize,
    tiny_config,
)
from families import LANGUAGE_MODELS
from layers import attention_layer, each_backbone
from references import cct_attention, control, layer_norm

from hf_moa import MoaBertForMultipleChoice, MoaBertForSequenceClassification, MoaBertModel
from hf_moa.modeling.attention.flow import AttentionFlow
from hf_moa.modeling.bert.layers import MoaBertAttention, MoaBertLayer
from hf_moa.modeling.cct.attention import AttentionGates
from hf_moa.modeling.cct.budgets import BudgetControl
from hf_moa.modeling.cct.control import ControlNetwork
from hf_moa.modeling.cct.costs import AttentionCost, AttentionUse, budget_loss
from hf_moa.modeling.core.budgets import made_on
from hf_moa.modeling.feed_forward.layers import build_feed_forward
from hf_moa.modeling.gpt2.layers import MoaGPT2Attention
from hf_moa.modeling.t5.layers import MoaT5LayerCrossAttention, MoaT5LayerSelfAttention


def cct_config(*, causal=False, sublayer_norm=True, **fields):
    config = tiny_config(
        **{
            "attn_implementation": "eager",
            "cct_budgets": [1, 0.5],
            "cct_sublayer_norm": sublayer_norm,
            "cct_gate_hidden_size": 16,
            "is_decoder": causal,
        }
        | fields
    )
    config.attention_probs_dropout_prob = config.hidden_dropout_prob = 0.0
    return config


def cct_layer(backbone="bert", *, cross=False, sublayer_norm=True, **fields):
    return attention_layer(
        backbone,
        cross=cross,
        cct_budgets=[1, 0.5],
        cct_sublayer_norm=sublayer_norm,
        cct_gate_hidden_size=16,
        **fields,
    )


# training is dense; in eval, each execution with each implementation is the same function
ways = pytest.mark.parametrize(
    ("training", "execution", "implementation"),
    [
        (True, "sparse", "eager"),
        (True, "sparse", "sdpa"),
        (False, "dense", "eager"),
        (False, "dense", "sdpa"),
        (False, "sparse", "eager"),
        (False, "sparse", "sdpa"),
    ],
)


@pytest.mark.parametrize("sublayer_norm", [True, False], ids=["norms", "plain"])
@ways
@each_backbone
def test_attention_equals_the_paper(backbone, training, execution, implementation, sublayer_norm):
    fields = {"cct_execution": execution, "attn_implementation": implementation}
    layer = cct_layer(backbone, sublayer_norm=sublayer_norm, **fields).train(training)
    x, mask = hidden()
    actual, record = layer(x, mask)
    expected = cct_attention(layer.core, layer.weights, x, mask)
    assert_same_with_gradients(actual[mask], expected[mask], [x, *layer.parameters()])
    if not training:  # the case is worth something only where some gates are open and some closed
        for gate in (record.use.kv, record.use.query):
            assert 0 < gate[mask].mean() < 1


@ways
@pytest.mark.parametrize("backbone", ["bert-decoder", "gpt2", "t5-decoder"])
def test_cross_attention_equals_the_paper(backbone, training, execution, implementation):
    fields = {"cct_execution": execution, "attn_implementation": implementation}
    layer = cct_layer(backbone, cross=True, **fields).train(training)
    x, mask = hidden()
    source, source_mask = hidden(length=5, seed=3)
    actual, record = layer(x, mask, source, source_mask)
    expected = cct_attention(layer.core, layer.weights, x, mask, source, source_mask)
    assert_same_with_gradients(actual[mask], expected[mask], [x, source, *layer.parameters()])
    if not training:
        assert 0 < record.use.kv[source_mask].mean() < 1


@pytest.mark.parametrize("execution", ["dense", "sparse"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_feed_forward_with_norms_is_the_gated_sum_of_its_parts(training, execution):
    config = cct_config(cct_execution=execution)
    layer = build_feed_forward(
        config, hidden_size=32, intermediate_size=48, activation="gelu", norm=torch.nn.LayerNorm
    )
    layer = randomize(layer.double(), seed=1).train(training)
    x, mask = hidden()
    actual, record = layer(x, mask)
    gates = control(layer.gate.control, x)
    expected = torch.zeros_like(x)
    for m, part in enumerate(layer.parts):
        inner = layer_norm(x, layer.input_norms[m]) @ part.up.weight.T + part.up.bias
        outer = torch.nn.functional.gelu(inner) @ part.down.weight.T + part.down.bias
        expected = expected + gates[..., m : m + 1] * layer_norm(outer, layer.output_norms[m])
    assert_same_with_gradients(actual, expected, [x, *layer.parameters()])
    assert record.use.gates.shape == (3, 7, 4)


@pytest.mark.parametrize("execution", ["dense", "sparse"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_plain_feed_forward_gates_slices_of_the_dense_layer(training, execution):
    config = cct_config(sublayer_norm=False, cct_execution=execution)
    layer = MoaBertLayer(config, layer_idx=0).double()
    layer = randomize(layer, seed=1).train(training)
    x, mask = hidden()
    actual, _ = layer._feed_forward(x, mask, None)
    gates = control(layer.feed_forward_gate.control, x)
    up, down = layer.intermediate.dense, layer.output.dense
    expected = x + down.bias
    for m in range(4):
        part = slice(12 * m, 12 * (m + 1))
        inner = torch.nn.functional.gelu(x @ up.weight[part].T + up.bias[part])
        expected = expected + gates[..., m : m + 1] * (inner @ down.weight[:, part].T)
    expected = layer_norm(expected, layer.output.LayerNorm)
    inputs = [x, *up.parameters(), *down.parameters(), *layer.feed_forward_gate.parameters()]
    assert_same_with_gradients(actual, expected, inputs)


def test_moa_and_mae_are_gated_too():
    for attention_type in ("moa", "mae"):
        layer = cct_layer(attention_type=attention_type, seed=5).eval()
        x, mask = hidden()
        update, record = layer(x, mask)
        closed = record.use.query == 0
        assert 0 < closed[mask].double().mean() < 1
        dense, skipped = layer.module.output.dense, update[closed]
        torch.testing.assert_close(skipped, dense.bias.expand_as(skipped), atol=1e-12, rtol=0)


def test_noise_is_scaled_and_only_in_training():
    network = ControlNetwork(hidden_size=8, gate_hidden_size=16, num_gates=3, starts_open=False)
    network = randomize(network.double())
    x = torch.randn(4, 5, 8, dtype=torch.float64)
    network.noise_scale.fill_(1.7)
    torch.manual_seed(3)
    noise = torch.randn(4, 5, 3, dtype=torch.float64)
    torch.manual_seed(3)
    logits = torch.relu(network.dense(x)) @ network.out.weight.T + network.out.bias
    torch.testing.assert_close(network.train()(x), torch.sigmoid(logits + 1.7 * noise))
    torch.testing.assert_close(network.eval()(x), (torch.sigmoid(logits) >= 0.5).double())


def test_a_gate_of_exactly_one_half_is_open():
    network = ControlNetwork(hidden_size=8, gate_hidden_size=16, num_gates=3, starts_open=False).eval()
    logits = torch.tensor([-1e-3, 0.0, 1e-3])
    with torch.no_grad():
        network.out.weight.zero_()
        network.out.bias.copy_(logits)
    gates = network(torch.randn(2, 5, 8))
    assert torch.equal(gates, (torch.sigmoid(logits) >= 0.5).float().expand(2, 5, 3))
    assert torch.equal(gates[0, 0], torch.tensor([0.0, 1.0, 1.0]))


# --- costs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_attention_cost_counts_what_is_computed(causal):
    cost = AttentionCost.of(hidden_size=32, num_heads=4, num_kv_heads=4, head_dim=8)
    assert (cost.kv, cost.query, cost.pair) == (2 * 32 * 32, 2 * 32 * 32, 2 * 32)
    generator = torch.Generator().manual_seed(0)
    query, kv = (torch.randint(0, 2, (3, 7), generator=generator).double() for _ in range(2))
    _, mask = hidden()
    use = AttentionUse(cost, causal, query, kv, past=None, mask=mask, kv_mask=mask)
    actual = use.per_sequence()[:, 0]
    for b in range(3):
        expected = 0.0
        for t in range(7):
            if not mask[b, t]:
                continue
            expected += cost.kv * kv[b, t]
            if query[b, t]:
                keys = [s for s in range(7) if mask[b, s] and kv[b, s] and (s <= t or not causal)]
                expected += cost.query + cost.pair * len(keys)
        assert actual[b].item() == pytest.approx(expected.item())


def test_moa_costs_count_its_own_projections():
    config = cct_config(attention_type="moa", num_attention_heads=2, head_dim=12)
    cost = MoaBertAttention(config, layer_idx=0).self.gates.cost
    assert (cost.kv, cost.query, cost.pair) == (2 * 32 * 12, 2 * 32 * 24, 2 * 24)


def test_compute_fraction_is_the_share_of_the_flops():
    """Counted again from the gates that the model reports, layer by layer."""
    model = randomize(MoaBertModel(cct_config()), seed=3).eval()
    ids, mask = batch()
    output = model(ids, attention_mask=mask, output_cct_gates=True)
    d, ff, splits = 32, 48, 4
    for b in range(3):
        used = full = 0.0
        n = int(mask[b].sum())
        for gates in output.cct_gates:
            kv, query, ffn = (gates[name][b, :n] for name in ("kv", "query", "ffn"))
            used += 2 * d * d * (kv.sum() + query.sum()) + 2 * d * query.sum() * kv.sum()
            used += ffn.sum() * 2 * d * ff / splits
            full += 4 * d * d * n + 2 * d * n * n + n * 2 * d * ff
        assert output.compute_fraction[b].item() == pytest.approx(used.item() / full, rel=1e-5)
    assert 0 < output.compute_fraction.min() < 1


def test_compute_fraction_of_a_decoder_counts_visible_keys_and_real_tokens():
    config = cct_config(causal=True, add_cross_attention=True)
    model = randomize(MoaBertModel(config).double(), seed=3).eval()
    ids, mask = batch()
    source, source_mask = hidden(length=6, seed=4)
    output = model(
        ids,
        attention_mask=mask,
        encoder_hidden_states=source,
        encoder_attention_mask=source_mask.long(),
        use_cache=False,
        output_cct_gates=True,
    )
    d, ff, splits = 32, 48, 4
    for b in range(3):
        used = full = 0.0
        n, s = int(mask[b].sum()), int(source_mask[b].sum())
        for gates in output.cct_gates:
            kv, query, ffn, cross_query = (
                gates[name][b, :n] for name in ("kv", "query", "ffn", "cross_query")
            )
            cross_kv = gates["cross_kv"][b, :s]
            used += 2 * d * d * (kv.sum() + query.sum()) + 2 * d * (query * kv.cumsum(0)).sum()
            used += 2 * d * d * (cross_kv.sum() + cross_query.sum())
            used += 2 * d * cross_query.sum() * cross_kv.sum() + ffn.sum() * 2 * d * ff / splits
            full += 4 * d * d * n + 2 * d * n * (n + 1) / 2 + 2 * d * d * (s + n) + 2 * d * n * s
            full += n * 2 * d * ff
        assert output.compute_fraction[b].item() == pytest.approx(used.item() / full, rel=1e-9)


def test_open_gates_cost_exactly_everything():
    model = MoaBertModel(cct_config(sublayer_norm=False)).eval()
    ids, mask = batch()
    assert model(ids, attention_mask=mask).compute_fraction.tolist() == [1.0, 1.0, 1.0]


def test_mean_budget_loss_weighs_budgets_as_they_are_drawn():
    used = torch.tensor([3.0, 8.0, 5.0, 2.0], dtype=torch.float64, requires_grad=True)
    full = torch.tensor([10.0, 10.0, 20.0, 8.0], dtype=torch.float64)
    index = torch.tensor([0, 1, 1, 0])
    actual = budget_loss(torch.stack([used, full], dim=-1), index=index, budgets=[1.0, 0.5, 0.2])
    groups = {
        1.0: (used[0] + used[3], 18.0, 2 / 4),
        0.5: (used[1] + used[2], 30.0, 2 / 4),
    }
    expected = sum(
        share * (budget * total - spent).abs() / (budget * total)
        for budget, (spent, total, share) in groups.items()
    )
    assert_same_with_gradients(actual, expected, [used])


def test_budget_loss_is_two_sided():
    for used, expected in ((5.0, 0.0), (10.0, 1.0), (2.5, 0.5)):
        cost = torch.tensor([[used, 10.0]])
        loss = budget_loss(cost, index=torch.tensor([0]), budgets=[0.5])
        assert loss.item() == pytest.approx(expected)


def test_padding_costs_nothing():
    model = randomize(MoaBertModel(cct_config()), seed=3).eval()
    ids, mask = batch()
    together = model(ids, attention_mask=mask).compute_fraction
    for b in range(3):
        n = int(mask[b].sum())
        alone = model(ids[b : b + 1, :n]).compute_fraction
        torch.testing.assert_close(alone[0], together[b])


# --- budgets --------------------------------------------------------------------------------------


def model_with_budgets(budgets=(1, 1, 0.5, 0.25)):
    torch.manual_seed(0)
    config = cct_config(cct_budgets=list(budgets))
    return randomize(MoaBertForSequenceClassification(config), seed=4).eval()


def test_budget_is_chosen_by_call_by_model_and_by_default():
    model = model_with_budgets()
    ids, mask = batch()
    largest = model(ids, attention_mask=mask).logits
    half = model(ids, attention_mask=mask, budget=0.5).logits
    assert torch.equal(model(ids, attention_mask=mask, budget=1).logits, largest)
    assert not torch.equal(half, largest)
    model.set_budget(0.5)
    assert torch.equal(model(ids, attention_mask=mask).logits, half)
    assert torch.equal(model(ids, attention_mask=mask, budget=1.0).logits, largest)
    model.set_budget(None)
    assert torch.equal(model(ids, attention_mask=mask).logits, largest)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_one_budget_per_sequence(dtype):
    model = model_with_budgets((1, 0.33, 0.5))
    ids, mask = batch()
    budgets = torch.tensor([0.5, 1.0, 0.33], dtype=dtype)
    mixed = model(ids, attention_mask=mask, budget=budgets).logits
    for b, budget in enumerate((0.5, 1.0, 0.33)):
        single = model(ids, attention_mask=mask, budget=budget).logits
        torch.testing.assert_close(mixed[b], single[b], atol=1e-6, rtol=0)
    rounded = budgets.float().double()
    if dtype is torch.float64:
        assert torch.equal(model(ids, attention_mask=mask, budget=rounded).logits, mixed)


def test_choices_of_an_example_share_its_budget():
    torch.manual_seed(0)
    model = randomize(MoaBertForMultipleChoice(cct_config(cct_budgets=[1, 0.5])), seed=4).eval()
    ids, _ = batch(batch_size=4)
    ids = ids.view(2, 2, -1)
    mixed = model(ids, budget=torch.tensor([0.5, 1.0])).logits
    torch.testing.assert_close(mixed[0], model(ids, budget=0.5).logits[0], atol=1e-6, rtol=0)
    torch.testing.assert_close(mixed[1], model(ids, budget=1.0).logits[1], atol=1e-6, rtol=0)


def test_training_draws_each_budget_with_its_weight():
    control = BudgetControl(
        [1, 1, 1, 0.5], default=1, hidden_size=4, symbols_start_at_zero=False
    ).train()
    torch.manual_seed(0)
    budget = control(8000, torch.device("cpu"))
    assert control.values == [1.0, 0.5]
    assert (budget.index == 0).float().mean().item() == pytest.approx(0.75, abs=0.02)
    torch.testing.assert_close(budget.embedding[:, 0], control.control_symbols.weight[budget.index])


@pytest.mark.parametrize("case", LANGUAGE_MODELS, ids=lambda case: case.family.name)
@pytest.mark.parametrize("sublayer_norm", [True, False], ids=["paper", "converted"])
def test_attention_drops_before_its_output_in_the_papers_layout(case, sublayer_norm):
    fields = dict.fromkeys(case.family.no_dropout, 0.5)
    model = case.build(cct_budgets=[1], cct_sublayer_norm=sublayer_norm, **fields).train()
    zeros = {"before": [], "behind": []}

    def count(module, place):
        module.register_forward_hook(lambda _, __, x: zeros[place].append((x == 0).float().mean()))

    for module in model.modules():
        if isinstance(module, AttentionFlow):
            getattr(module, module.dropout_name).p = 0.0  # it would leave zeros of its own
        if isinstance(module, AttentionGates):
            count(module.context_dropout, "before")
        elif isinstance(module, MoaBertAttention):
            count(module.output.dropout, "behind")
        elif isinstance(module, MoaGPT2Attention):
            count(module.resid_dropout, "behind")
        elif isinstance(module, (MoaT5LayerSelfAttention, MoaT5LayerCrossAttention)):
            count(module.dropout, "behind")
    model(**case.inputs())
    assert len(zeros["before"]) == len(zeros["behind"]) > 0
    drops, keeps = ("before", "behind") if sublayer_norm else ("behind", "before")
    for share in zeros[drops]:
        torch.testing.assert_close(share, torch.tensor(0.5), atol=0.15, rtol=0)
    assert max(zeros[keeps]) < 0.01


def test_training_loss_includes_the_budget_loss_and_eval_loss_does_not():
    model = model_with_budgets()
    ids, mask = batch()
    labels = torch.tensor([0, 1, 2])
    output = model(ids, attention_mask=mask, labels=labels)
    task = torch.nn.functional.cross_entropy(output.logits, labels)
    torch.testing.assert_close(output.loss, task)
    model.train()
    output = model(ids, attention_mask=mask, labels=labels)
    task = torch.nn.functional.cross_entropy(output.logits, labels)
    torch.testing.assert_close(output.loss, task + output.aux_loss)
    assert output.aux_loss > 0
    loss = output.aux_losses["budget_loss"] / 3  # a budget's share of the sum
    torch.testing.assert_close(output.aux_loss.detach(), loss)


def test_training_pulls_the_compute_to_the_budget():
    """Under its budget loss alone, a model learns to spend what each budget allows."""
    torch.manual_seed(0)
    config = cct_config(cct_budgets=[1, 0.5], num_hidden_layers=1)
    model = MoaBertModel(config).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    ids, _ = batch(batch_size=8, length=20)
    for _ in range(150):
        optimizer.zero_grad()
        model(ids, attention_mask=(ids > 0).long()).aux_loss.backward()
        optimizer.step()
    model.set_cct_noise_scale(0.0)
    for budget in (1.0, 0.5):
        fraction = model(ids, budget=budget).compute_fraction.mean().item()
        assert fraction == pytest.approx(budget, abs=0.1)


def test_control_symbols_and_gates_of_a_converted_model_start_neutral():
    model = MoaBertModel(cct_config(sublayer_norm=False)).train()
    assert torch.all(model.cct.control_symbols.weight == 0)
    ids, mask = batch()
    gates = model(ids, attention_mask=mask, output_cct_gates=True).cct_gates
    for layer in gates:
        for gate in layer.values():
            torch.testing.assert_close(gate, torch.full_like(gate, torch.sigmoid(torch.tensor(4.0))))


def test_budgets_are_made_where_the_model_is():
    with torch.device("meta"):
        assert made_on(torch.device("cpu"), [1, 0.5]).tolist() == [1, 0.5]
