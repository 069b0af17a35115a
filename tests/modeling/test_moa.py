"""MoA (Zhang et al. 2022) against a loop over tokens and experts."""

import pytest
import torch
from common import assert_same_with_gradients, hidden, randomize, tiny_config
from families import CASE
from layers import attention_layer, each_backbone, new_attention_layer
from references import moa_attention

from hf_moa import MoaBertModel
from hf_moa.modeling.moa.projections import ExpertInput, ExpertOutput
from hf_moa.modeling.routing.routers import TopKRouter


def moa_layer(backbone="bert", *, heads=2, experts=5, head_dim=12, **fields):
    return attention_layer(
        backbone,
        attention_type="moa",
        num_attention_heads=heads,
        num_attention_experts=experts,
        head_dim=head_dim,
        **fields,
    )


@pytest.mark.parametrize(
    ("heads", "experts", "head_dim"),
    [(1, 1, 32), (1, 4, 5), (2, 5, 12), (4, 4, 8), (3, 16, 7)],
    ids=lambda value: str(value),
)
@each_backbone
def test_equals_the_loop_over_tokens_and_experts(backbone, heads, experts, head_dim):
    layer = moa_layer(backbone, heads=heads, experts=experts, head_dim=head_dim)
    x, mask = hidden()
    actual, _ = layer(x, mask)
    expected = moa_attention(layer.core, layer.weights, x, mask)
    assert_same_with_gradients(actual[mask], expected[mask], [x, *layer.parameters()])


@pytest.mark.parametrize(
    ("heads", "experts", "groups"),
    [(4, 8, 2), (4, 4, 4), (3, 9, 3), (6, 6, 2)],
    ids=lambda value: str(value),
)
@each_backbone
def test_experts_in_groups_equal_the_loop_over_tokens_and_experts(backbone, heads, experts, groups):
    layer = moa_layer(backbone, heads=heads, experts=experts, moa_key_value_heads=groups)
    assert len(layer.weights.key) == groups
    x, mask = hidden()
    actual, _ = layer(x, mask)
    expected = moa_attention(layer.core, layer.weights, x, mask)
    assert_same_with_gradients(actual[mask], expected[mask], [x, *layer.parameters()])


@pytest.mark.parametrize("backbone", ["bert", "gpt2", "t5"])
def test_new_experts_together_have_the_scale_of_heads(backbone):
    """Weights sum to 1, so experts initialised as heads are would start at 1/k of it."""
    heads = new_attention_layer(backbone)
    experts = new_attention_layer(backbone, attention_type="moa", num_attention_experts=8)
    x, mask = torch.randn(2_000, 1, 32, dtype=torch.float64), torch.ones(2_000, 1, dtype=torch.bool)
    scale, expected = (layer(x, mask)[0].std().item() for layer in (experts, heads))
    assert scale == pytest.approx(expected, rel=0.2)


def test_noisy_router_replaces_the_logits():
    layer = moa_layer(router_type="noisy_topk").eval()
    plain = moa_layer().eval()
    plain.module.load_state_dict(layer.module.state_dict(), strict=False)
    x, mask = hidden()
    torch.testing.assert_close(layer(x, mask)[0], plain(x, mask)[0])
    layer.train()
    assert not torch.allclose(layer(x, mask)[0], plain(x, mask)[0])


def test_expert_input_is_the_chosen_experts_linear():
    linear = randomize(ExpertInput(num_experts=5, in_features=6, out_features=3).double())
    x = torch.randn(2, 4, 6, dtype=torch.float64)
    index = torch.stack([torch.randperm(5)[:2] for _ in range(8)]).view(2, 4, 2)
    actual = linear(x, index)
    for b, t, s in torch.cartesian_prod(*map(torch.arange, (2, 4, 2))).tolist():
        e = index[b, t, s]
        torch.testing.assert_close(actual[b, t, s], linear.weight[e] @ x[b, t] + linear.bias[e])


def test_expert_output_is_the_weighted_sum():
    linear = randomize(ExpertOutput(num_experts=5, in_features=3, out_features=6).double())
    x = torch.randn(2, 4, 2, 3, dtype=torch.float64)
    index = torch.stack([torch.randperm(5)[:2] for _ in range(8)]).view(2, 4, 2)
    weight = torch.rand(2, 4, 2, dtype=torch.float64)
    actual = linear(x, index, weight)
    for b, t in torch.cartesian_prod(torch.arange(2), torch.arange(4)).tolist():
        expected = linear.bias.clone()
        for s in range(2):
            expected += weight[b, t, s] * (x[b, t, s] @ linear.weight[index[b, t, s]])
        torch.testing.assert_close(actual[b, t], expected)


def test_router_logits_are_one_per_layer():
    config = tiny_config(attention_type="moa", num_attention_experts=9)
    ids = torch.randint(5, 60, (2, 6))
    output = MoaBertModel(config).eval()(ids, output_router_logits=True)
    assert [tuple(logits.shape) for logits in output.router_logits] == [(2, 6, 9)] * 2


def test_losses_are_summed_over_layers_and_weighted():
    config = tiny_config(
        attention_type="moa",
        router_type="noisy_topk",
        router_balance_loss_coef=0.3,
        router_z_loss_coef=0.05,
        router_importance_loss_coef=0.7,
        router_load_loss_coef=0.11,
    )
    model = randomize(MoaBertModel(config)).eval()
    ids = torch.randint(5, 60, (2, 6))
    output = model(ids)
    captured = []
    for layer in model.encoder.layer:
        layer.attention.self.mixture.router.register_forward_hook(
            lambda module, args, routing: captured.append(routing.losses)
        )
    model(ids)
    coefficients = {
        "router_balance_loss": 0.3,
        "router_z_loss": 0.05,
        "router_importance_loss": 0.7,
        "router_load_loss": 0.11,
    }
    assert len(captured) == 2
    expected = sum(coefficients[name] * loss for losses in captured for name, loss in losses.items())
    torch.testing.assert_close(output.aux_loss, expected)
    for name in coefficients:
        torch.testing.assert_close(output.aux_losses[name], sum(losses[name] for losses in captured))


@pytest.mark.parametrize("name", ["BertForMaskedLM", "GPT2LMHeadModel", "T5ForConditionalGeneration"])
def test_executions_compute_the_same(name):
    model = CASE[name].build(attention_type="moa").double()
    inputs, found = CASE[name].inputs(), []
    for execution in ("dense", "sparse", "auto"):
        model.set_moa_execution(execution)
        assert model.config.moa_execution == execution
        logits = model(**inputs).logits
        gradients = torch.autograd.grad(logits.sin().sum(), list(model.parameters()), allow_unused=True)
        found.append((logits, *gradients))
    for others in found[1:]:
        for one, other in zip(others, found[0], strict=True):
            if other is not None:
                torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-8)


def test_bad_executions_are_errors():
    with pytest.raises(ValueError, match="moa_execution must be one of 'auto', 'sparse', 'dense'"):
        CASE["BertModel"].config(moa_execution="fast")
    with pytest.raises(ValueError, match="execution must be one of"):
        CASE["BertModel"].build(attention_type="moa").set_moa_execution("fast")
    with pytest.raises(ValueError, match="set_moa_execution needs attention_type='moa'"):
        CASE["BertModel"].build().set_moa_execution("dense")


@pytest.mark.parametrize("router_type", ["topk", "noisy_topk"])
def test_routers_of_new_models_start_even_and_loaded_ones_as_they_were(router_type, tmp_path):
    fields = {"attention_type": "moa", "router_type": router_type}
    model = MoaBertModel(tiny_config(**fields))
    routers = [module for module in model.modules() if isinstance(module, TopKRouter)]
    assert len(routers) == 2
    assert not any(router.gate.weight.any() for router in routers)
    assert model.encoder.layer[0].attention.self.query.weight.std() > 0
    with torch.no_grad():
        for router in routers:
            router.gate.weight.normal_()
    model.save_pretrained(tmp_path)
    loaded = MoaBertModel.from_pretrained(tmp_path)
    for name, parameter in model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter), name
