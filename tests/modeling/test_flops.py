"""`model.flops` counts what torch's own counter sees, and what the equations say."""

import accelerate
import pytest
import torch
from families import CASE, each_class, each_variant
from peft import get_peft_model
from torch.utils.flop_counter import FlopCounterMode

import hf_moa
from hf_moa.modeling.attention.flow import AttentionFlow
from hf_moa.modeling.mae.mixture import MixtureOfHeads
from hf_moa.modeling.moa.projections import ExpertInput

LENGTH = 9


def build(case, **fields):
    experts = {"experts_implementation": "eager"} if fields.get("ffn_type") == "moe" else {}
    return case.build(cct_execution="dense", attn_implementation="eager", **experts, **fields)


def run_one_sequence(model, case, **kwargs):
    ids = torch.randint(5, 60, (1, LENGTH))
    if case.plain_name == "T5ForSequenceClassification":
        ids[0, -1] = 1
    inputs = {"input_ids": ids.unsqueeze(1) if case.task == "MultipleChoice" else ids}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.randint(5, 60, (1, decoder_length(model)))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        output = model(**inputs, **kwargs)
    return counter.get_total_flops(), output


def decoder_length(model):
    # a classifier looks at the end token's place in both
    return LENGTH if type(model) is hf_moa.MoaT5ForSequenceClassification else 6


def lengths_of(model):
    if not model.config.is_encoder_decoder:
        return {"sequence_length": LENGTH}
    return {"sequence_length": LENGTH, "decoder_length": decoder_length(model)}


def products_outside_the_equations(model):
    """What the counter sees beside: pooling as a matrix product, experts' weights collapsed to heads'
    weights, and later keys, whose scores are computed and masked."""
    flops = 0
    for name, module in model.named_modules():
        length = decoder_length(model) if "decoder" in name else LENGTH
        if isinstance(module, MixtureOfHeads) and module.gate is not None:
            if module.num_dropped > 1:
                gates = length if module.is_causal else 1
                flops += 2 * gates * module.num_experts * module.num_heads
            if module.is_causal:
                flops += 2 * length * length * module.gate.dense.out_features
        elif isinstance(module, AttentionFlow) and module.is_causal:
            if "ForSequenceClassification" in type(model).__name__ and name == "transformer.h.1.attn":
                continue  # its one query, the last token's, sees all keys
            flops += 4 * module.num_heads * module.head_dim * length * (length - 1) // 2
    return flops


def check_against_torch(case, fields):
    model = build(case, **fields)
    counted, _ = run_one_sequence(model, case)
    flops = model.flops(**lengths_of(model))
    # the plain loop over feed-forward experts computes no other than the chosen
    is_moe = model.config.ffn_type == "moe"
    idle = sum(p.total - p.active for p in flops.parts if p.part == "feed_forward" and is_moe)
    assert counted == flops.total - idle + products_outside_the_equations(model)
    assert 0 < flops.active <= flops.total
    if model.config.cct_full_budget_is_plain:
        assert flops.gating == 0
        flops = model.flops(**lengths_of(model), budget=0.5)
    assert (flops.gating > 0) == any(
        hasattr(m, "gate_kind") and any(True for _ in m.parameters()) for m in model.modules()
    )


@each_variant
def test_total_equals_torchs_counter(case, fields):
    check_against_torch(case, fields)


@each_class
def test_total_equals_torchs_counter_for_every_head(case):
    check_against_torch(case, {"attention_type": "mae"})


@pytest.mark.parametrize("name", ["BertForMaskedLM", "GPT2LMHeadModel", "T5ForConditionalGeneration"])
def test_active_experts_equal_torchs_counter(name):
    """Expert by expert, what is computed is what is active, forward and backward."""
    model = build(CASE[name], attention_type="moa", num_attention_experts=6, head_dim=12)
    model.set_moa_execution("sparse")
    counted, _ = run_one_sequence(model, CASE[name])
    assert counted == model.flops(**lengths_of(model)).active + products_outside_the_equations(model)


def test_torch_counts_the_backward_of_expert_products():
    counts = []
    for execution in ("sparse", "dense"):
        torch.manual_seed(0)
        layer = ExpertInput(num_experts=3, in_features=8, out_features=4, execution=execution)
        x, index = torch.randn(1, 5, 8, requires_grad=True), torch.randint(3, (1, 5, 3))
        with FlopCounterMode(display=False) as counter:
            layer(x, index).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] == 3 * 2 * 5 * 3 * 8 * 4  # k = N: all are computed in both


@pytest.mark.parametrize("sublayer_norm", [True, False])
@pytest.mark.parametrize("name", ["BertForMaskedLM", "GPT2LMHeadModel"])
def test_sparse_execution_leaves_out_what_the_gates_close(name, sublayer_norm):
    """With eager attention the projections of closed tokens are left out, and no scores are."""
    model = build(CASE[name], cct_budgets=[1, 0.5], cct_sublayer_norm=sublayer_norm)
    torch.manual_seed(3)
    dense, _ = run_one_sequence(model, CASE[name])
    model.set_cct_execution("sparse")
    torch.manual_seed(3)
    sparse, output = run_one_sequence(model, CASE[name], output_cct_gates=True)
    attentions = [m for m in model.modules() if isinstance(m, AttentionFlow)]
    splits = model.config.cct_num_ffn_splits
    part = 2 * 32 * 48 // splits
    closed = 0
    for attention, gates in zip(attentions, output.cct_gates, strict=True):
        closed += attention.gates.cost.kv * int((gates["kv"] == 0).sum())
        closed += attention.gates.cost.query * int((gates["query"] == 0).sum())
        closed += part * int((gates["ffn"] == 0).sum())
    assert closed > 0
    assert dense - sparse == 2 * closed


def test_equals_the_equations_by_hand():
    d, ff, heads, hidden, length = 32, 48, 4, 256, 9
    model = hf_moa.MoaBertModel(
        CASE["BertModel"].config(
            attention_type="mae", mae_gate_hidden_size=hidden, cct_budgets=[1, 0.5, 0.2]
        ),
        add_pooling_layer=False,
    )
    gate = hidden * d + hidden * heads  # one gate per sequence, h experts
    attention_control = length * 128 * (d + 2)
    ffn_control = length * 128 * (d + 4)
    attention = length * 4 * d * d + 2 * length * length * d
    ffn = length * 2 * d * ff
    for budget in (1, 0.5, 0.2):
        flops = model.flops(length, budget=budget)
        first, second = flops.parts[:2]
        assert (first.name, first.part) == ("encoder.layer.0", "self_attention")
        assert (second.name, second.part) == ("encoder.layer.0", "feed_forward")
        assert first.total == 2 * (gate + attention_control + attention)
        assert first.active == pytest.approx(2 * (gate + attention_control + budget * attention))
        assert first.gating == 2 * (gate + attention_control)
        assert second.active == pytest.approx(2 * (ffn_control + budget * ffn))
        assert flops.budget == budget
    assert flops.active == pytest.approx(2 * (first.active + second.active))  # two layers


def test_budgets_of_an_encoder_decoder_model():
    model = CASE["T5ForConditionalGeneration"].build(cct_budgets=[1, 0.5])
    full, half = (model.flops(9, decoder_length=6, budget=b) for b in (None, (1, 0.5)))
    assert full.budget == (1.0, 1.0)
    assert half.budget == (1.0, 0.5)
    for a, b in zip(full.parts, half.parts, strict=True):
        assert (a.active == b.active) == a.name.startswith(("encoder", "lm_head"))
    model.set_budget((1, 0.5))
    assert model.flops(9, decoder_length=6) == half
    assert half.num_tokens == 15
    assert model.flops(9).num_tokens == 18


def test_leaves_the_model_as_it_was():
    case = CASE["T5ForConditionalGeneration"]
    model = case.build(attention_type="mae", attn_implementation="eager").train()
    model.encoder.eval()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    training = [m.training for m in model.modules()]
    model.flops(9)
    assert all(p is parameters[name] for name, p in model.named_parameters())
    torch.testing.assert_close(model.state_dict(), state, atol=0, rtol=0)
    assert [m.training for m in model.modules()] == training
    assert not any(m._forward_hooks for m in model.modules())
    assert model.decoder.config._attn_implementation == "eager"


def test_counts_an_adapters_copy_instead_of_what_it_replaces():
    model = CASE["BertForSequenceClassification"].build(attention_type="mae")
    plain = model.flops(9)
    adapted = get_peft_model(model, hf_moa.FTGConfig(task_type="SEQ_CLS"))
    assert adapted.get_base_model().flops(9).active == plain.active


def test_halves_and_offloaded_models_are_counted():
    model = CASE["T5ForConditionalGeneration"].build(attention_type="mae")
    whole = model.flops(9)
    encoder = [p for p in whole.parts if p.name.startswith("encoder")]
    assert model.get_encoder().flops(9).active == sum(p.active for p in encoder)
    assert model.get_decoder().flops(9).active > 0  # without cross-attention
    accelerate.cpu_offload(model, torch.device("cpu"))
    assert model.flops(9) == whole
    ids = torch.ones(1, 4, dtype=torch.long)
    assert model(input_ids=ids, decoder_input_ids=ids).logits.isfinite().all()


def test_shows_millions_per_token_and_gives_plain_data():
    flops = CASE["BertModel"].build(attention_type="moa").flops(9)
    table = str(flops).splitlines()
    assert len(table) == 2 + len(flops.parts) + 1
    assert f"{flops.total / 9 / 1e6:.4g}" in table[-1]
    data = flops.as_dict()
    assert data["active"] == sum(part["active"] for part in data["parts"])


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("BertModel", {"sequence_length": 0}, "sequence_length must be an integer of at least 1"),
        ("BertModel", {"sequence_length": 9, "decoder_length": 3}, "decoder_length needs an encoder-"),
        ("T5Model", {"sequence_length": 9, "decoder_length": 1.5}, "decoder_length must be"),
        ("BertModel", {"sequence_length": 9, "budget": 0.5}, "budget needs a model with budgets"),
    ],
)
def test_refuses(name, arguments, message):
    with pytest.raises(ValueError, match=message):
        CASE[name].build().flops(**arguments)


def test_refuses_an_unknown_budget_and_restores_the_model():
    model = CASE["BertModel"].build(cct_budgets=[1, 0.5])
    with pytest.raises(ValueError, match="must be one of the model's budgets"):
        model.flops(9, budget=0.7)
    assert all(p.device.type == "cpu" for p in model.parameters())
