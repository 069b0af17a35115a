"""What is particular to gated GPT-2."""

import pytest
import torch
from common import batch
from families import CASE, GPT2
from transformers import GPT2LMHeadModel

LM = CASE["GPT2LMHeadModel"]


@pytest.mark.parametrize(
    "fields",
    [
        {"scale_attn_by_inverse_layer_idx": True},
        {"scale_attn_weights": False},
        {"reorder_and_upcast_attn": True, "attn_implementation": "eager"},
        {"n_inner": None, "activation_function": "relu"},
        {"add_cross_attention": True},
    ],
    ids=str,
)
def test_options_of_gpt2_are_kept(fields):
    reference = LM.build_plain(**fields)
    model = LM.gated(LM.config(**fields)).eval()
    model.load_state_dict(reference.state_dict())
    inputs = LM.inputs()
    if "add_cross_attention" in fields:
        inputs["encoder_hidden_states"] = torch.randn(3, 5, 32)
    expected = reference(**inputs).logits
    torch.testing.assert_close(model(**inputs).logits, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("fields", [{"attention_type": "mae"}, {"attention_type": "moa"}], ids=str)
def test_upcast_attention_is_attention(fields):
    model = LM.build(attn_implementation="eager", **fields)
    upcast = LM.build(attn_implementation="eager", reorder_and_upcast_attn=True, **fields)
    inputs = LM.inputs()
    torch.testing.assert_close(upcast(**inputs).logits, model(**inputs).logits, atol=1e-5, rtol=0)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.isfinite(upcast(**inputs).logits).all()


def test_token_types_and_positions_are_gpt2s():
    reference, model = LM.build_plain(), LM.gated(LM.config()).eval()
    model.load_state_dict(reference.state_dict())
    inputs = LM.inputs() | {
        "token_type_ids": torch.randint(5, 67, (3, 9)),
        "position_ids": torch.randperm(9).expand(3, -1),
    }
    assert torch.equal(model(**inputs).logits, reference(**inputs).logits)


def test_logits_of_chosen_positions():
    model = LM.build(attention_type="mae")
    inputs = LM.inputs()
    logits = model(**inputs).logits
    torch.testing.assert_close(model(**inputs, logits_to_keep=2).logits, logits[:, -2:])
    kept = torch.tensor([0, 3])
    torch.testing.assert_close(model(**inputs, logits_to_keep=kept).logits, logits[:, kept])


def test_sequence_longer_than_the_positions():
    model = LM.build(attention_type="mae")
    ids = torch.randint(5, 67, (1, 41))
    with pytest.raises(ValueError, match="n_positions=40") as error:
        model(ids)
    assert "41" in str(error.value)
    cache = model(ids[:, :30]).past_key_values
    with pytest.raises(ValueError, match="n_positions=40"):
        model(ids[:, :11], past_key_values=cache)


def test_cross_attention_must_be_asked_for():
    with pytest.raises(ValueError, match="add_cross_attention"):
        LM.build()(**LM.inputs(), encoder_hidden_states=torch.randn(3, 5, 32))


def test_classifier_needs_a_padding_token():
    case = CASE["GPT2ForSequenceClassification"]
    model = case.build(pad_token_id=None)
    with pytest.raises(ValueError, match="pad_token_id"):
        model(**case.inputs())
    assert model(**case.inputs(batch_size=1)).logits.shape == (1, 3)


def test_classifier_finds_the_last_token_under_either_padding():
    case = CASE["GPT2ForSequenceClassification"]
    model, reference = case.gated(case.config()).eval(), case.build_plain()
    model.load_state_dict(reference.state_dict())
    ids, mask = batch()
    right = torch.where(mask.bool(), ids, 0)
    left, left_mask = right.flip(1), mask.flip(1)
    for tokens, attention_mask in ((right, mask), (left, left_mask)):
        expected = reference(tokens, attention_mask=attention_mask).logits
        torch.testing.assert_close(model(tokens, attention_mask=attention_mask).logits, expected)
        whole = model(tokens, attention_mask=attention_mask, output_hidden_states=True)
        assert torch.equal(whole.logits, expected)


def test_gates_are_reported_per_position():
    model = LM.build(attention_type="mae", mae_num_dropped_heads=2, cct_budgets=[1, 0.5])
    output = model(**LM.inputs(), output_expert_weights=True, output_cct_gates=True)
    assert [tuple(weights.shape) for weights in output.expert_weights] == [(3, 9, 6)] * 2
    for gates in output.cct_gates:
        shapes = {name: tuple(gate.shape) for name, gate in gates.items()}
        assert shapes == {"kv": (3, 9), "query": (3, 9), "ffn": (3, 9, 4)}
    routed = LM.build(attention_type="moa", add_cross_attention=True)
    source = torch.randn(3, 5, 32)
    output = routed(**LM.inputs(), encoder_hidden_states=source, output_router_logits=True)
    assert [tuple(logits.shape) for logits in output.router_logits] == [(3, 9, 8)] * 2
    assert [tuple(logits.shape) for logits in output.cross_router_logits] == [(3, 9, 8)] * 2


def test_residual_projections_start_smaller_with_depth():
    torch.manual_seed(0)
    for fields in ({}, {"attention_type": "moa", "ffn_type": "moe"}, {"cct_budgets": [1]}):
        config = GPT2.config(n_embd=64, n_layer=8, n_inner=128, **fields)
        block = LM.gated(config).transformer.h[0]
        averaged = config.n_head if config.attention_type == "moa" else 1  # k experts
        assert block.attn.c_proj.weight.std().item() == pytest.approx(averaged * 0.02 / 4, rel=0.1)
        feed_forward = block.mlp.c_proj if hasattr(block.mlp, "c_proj") else None
        if feed_forward is not None:
            assert feed_forward.weight.std().item() == pytest.approx(0.02 / 4, rel=0.1)
    parts = block.mlp.parts
    assert parts[0].down.weight.std().item() == pytest.approx(0.02 / 4, rel=0.15)
    assert parts[0].up.weight.std().item() == pytest.approx(0.02, rel=0.1)


def test_labels_that_are_shifted_already():
    reference, model = LM.build_plain(), LM.gated(LM.config()).eval()
    model.load_state_dict(reference.state_dict())
    inputs, labels = LM.inputs(), LM.labels()["labels"]
    shifted = labels.flip(0)
    for kwargs in ({}, {"shift_labels": shifted}, {"num_items_in_batch": 7, "shift_labels": shifted}):
        expected = reference(**inputs, labels=labels, **kwargs).loss
        torch.testing.assert_close(model(**inputs, labels=labels, **kwargs).loss, expected)


def test_trainer_counts_the_tokens_that_are_predicted():
    assert LM.gated(LM.config()).loss_type == "ForCausalLM"
    assert isinstance(LM.build_plain(), GPT2LMHeadModel)
