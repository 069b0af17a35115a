"""Bad input of a model: a clear error, or the documented behaviour."""

import pytest
import torch
from common import VARIANTS, batch, randomize, tiny_config
from families import CASE
from safetensors.torch import load_file, save_file

from hf_moa import MoaBertForSequenceClassification, MoaBertModel

each_variant = pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS.keys())


def model_of(**fields):
    torch.manual_seed(0)
    return randomize(MoaBertForSequenceClassification(tiny_config(**fields))).eval()


# --- budgets, phases, selections ------------------------------------------------------------------


@pytest.mark.parametrize("budget", [0.7, 0, -1, "1", True, 2, float("nan")])
def test_unknown_budget_names_the_list(budget):
    model = model_of(cct_budgets=[1, 0.5])
    ids, mask = batch()
    with pytest.raises(ValueError, match=r"\[1\.0, 0\.5\]") as error:
        model(ids, attention_mask=mask, budget=budget)
    assert repr(budget) in str(error.value)
    with pytest.raises(ValueError, match=r"\[1\.0, 0\.5\]"):
        model.set_budget(budget)


def test_tensor_of_budgets_is_checked():
    model = model_of(cct_budgets=[1, 0.5])
    ids, mask = batch()
    with pytest.raises(ValueError, match=r"\[1\.0, 0\.5\]"):
        model(ids, attention_mask=mask, budget=torch.tensor([1.0, 0.5, 0.4]))
    for bad in (torch.tensor([float("nan"), 1.0, 0.5]), torch.ones(3, dtype=torch.bool)):
        with pytest.raises(ValueError, match=r"\[1\.0, 0\.5\]"):
            model(ids, attention_mask=mask, budget=bad)
    with pytest.raises(ValueError, match=r"shape \(3,\)"):
        model(ids, attention_mask=mask, budget=torch.tensor([1.0, 0.5]))
    for pair in ((1, 0.5), [1, 0.5, 0.5]):  # a pair is for encoder-decoder models
        with pytest.raises(ValueError, match=r"\[1\.0, 0\.5\]"):
            model(ids, attention_mask=mask, budget=pair)


def test_budget_without_cct():
    model = model_of()
    ids, mask = batch()
    with pytest.raises(ValueError, match="cct_budgets"):
        model(ids, attention_mask=mask, budget=0.5)
    with pytest.raises(ValueError, match="cct_budgets"):
        model.set_budget(0.5)
    with pytest.raises(ValueError, match="cct_budgets"):
        model.set_cct_noise_scale(1.0)


def test_what_switches_off_goes_with_every_model():
    model = model_of()
    model.set_budget(None)
    model.set_expert_selection(None)


@pytest.mark.parametrize("scale", [-1.0, float("nan"), float("inf"), "a", None])
def test_bad_noise_scale(scale):
    with pytest.raises(ValueError, match="scale"):
        model_of(cct_budgets=[1]).set_cct_noise_scale(scale)


def test_wrong_phase():
    with pytest.raises(ValueError, match="'mixture', 'gate', 'expert'"):
        model_of(attention_type="mae").set_mae_phase("experts")
    with pytest.raises(ValueError, match="attention_type='mae'"):
        model_of(attention_type="moa").set_mae_phase("gate")
    with pytest.raises(ValueError, match="uniform"):
        model_of(attention_type="mae", mae_gate_type="uniform").set_mae_phase("gate")


def test_wrong_selection():
    with pytest.raises(ValueError, match="argmax"):
        model_of(attention_type="mae").set_expert_selection("best")
    with pytest.raises(ValueError, match="attention_type='mae'"):
        model_of().set_expert_selection("argmax")


# --- tensors --------------------------------------------------------------------------------------


def test_sequence_longer_than_the_positions():
    model = model_of()
    with pytest.raises(ValueError, match="max_position_embeddings=40") as error:
        model(torch.full((1, 41), 7))
    assert "41" in str(error.value)


def test_cached_sequence_longer_than_the_positions():
    model = MoaBertModel(tiny_config(is_decoder=True)).eval()
    cache = model(torch.full((1, 39), 7), use_cache=True).past_key_values
    with pytest.raises(ValueError, match="max_position_embeddings=40"):
        model(torch.full((1, 2), 7), past_key_values=cache, use_cache=True)


def test_exactly_one_of_ids_and_embeddings():
    model = model_of()
    with pytest.raises(ValueError, match="exactly one"):
        model()
    with pytest.raises(ValueError, match="exactly one"):
        model(torch.ones(1, 3, dtype=torch.long), inputs_embeds=torch.zeros(1, 3, 32))


@pytest.mark.parametrize(
    ("name", "fields"), [("BertModel", {"is_decoder": True}), ("GPT2Model", {})], ids=["bert", "gpt2"]
)
def test_encoder_states_without_cross_attention(name, fields):
    model = CASE[name].build(**fields)
    states = torch.randn(1, 3, model.config.hidden_size)
    with pytest.raises(ValueError, match="set add_cross_attention=True in the config"):
        model(torch.tensor([[5, 6]]), encoder_hidden_states=states)


@each_variant
def test_all_padding_row_touches_no_other(fields):
    model = model_of(**fields)
    ids, mask = batch()
    expected = model(ids[:2], attention_mask=mask[:2]).logits
    mask[2] = 0
    output = model(ids, attention_mask=mask)
    torch.testing.assert_close(output.logits[:2], expected, atol=1e-5, rtol=0)
    assert torch.isfinite(output.logits).all()
    if output.compute_fraction is not None:
        assert output.compute_fraction[2] == 1


@each_variant
def test_all_padding_row_trains(fields):
    model = model_of(**fields).train()
    ids, mask = batch()
    mask[2] = 0
    loss = model(ids, attention_mask=mask, labels=torch.tensor([0, 1, 2])).loss
    loss.backward()
    assert torch.isfinite(loss)
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in model.parameters())


@each_variant
def test_nan_input_stays_in_its_row(fields):
    """As in transformers, NaN in is NaN out; in eval it reaches no other sequence.

    (In sparse execution it does not reach tokens whose queries are skipped: they attend to nothing.)
    """
    model = model_of(**fields | ({"cct_execution": "dense"} if "cct_budgets" in fields else {}))
    ids, mask = batch()
    embeds = model.get_input_embeddings()(ids).detach()
    expected = model(inputs_embeds=embeds, attention_mask=mask).logits
    embeds[1, 2] = float("nan")
    actual = model(inputs_embeds=embeds, attention_mask=mask).logits
    assert torch.isnan(actual[1]).all()
    torch.testing.assert_close(actual[[0, 2]], expected[[0, 2]])


def test_full_mask_rules_attention_only():
    """A mask `[B, 1, T, T]` tells no padding: gates count every token, as documented."""
    model = MoaBertModel(tiny_config(attention_type="mae", attn_implementation="eager"))
    model = randomize(model).eval()
    ids, _ = batch()
    full = torch.zeros(3, 1, 9, 9)
    expected = model(ids).last_hidden_state
    torch.testing.assert_close(model(ids, attention_mask=full).last_hidden_state, expected)


# --- checkpoints ----------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path):
    model_of(attention_type="mae").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    return tmp_path, weights


def test_missing_gate_weights_are_reported_and_start_neutral(checkpoint):
    path, weights = checkpoint
    kept = {name: tensor for name, tensor in weights.items() if ".gate." not in name}
    save_file(kept, path / "model.safetensors", metadata={"format": "pt"})
    model, report = MoaBertForSequenceClassification.from_pretrained(path, output_loading_info=True)
    assert set(report["missing_keys"]) == set(weights) - set(kept)
    ids, mask = batch()
    weights = model(ids, attention_mask=mask, output_expert_weights=True).expert_weights
    for layer in weights:
        torch.testing.assert_close(layer, torch.full((3, 4), 0.25))


def test_misshaped_gate_weights_are_an_error_that_names_them(checkpoint):
    path, weights = checkpoint
    name = next(name for name in weights if name.endswith("gate.out.weight"))
    weights[name] = torch.zeros(6, 256)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RuntimeError, match="mismatch"):
        MoaBertForSequenceClassification.from_pretrained(path)
    model, report = MoaBertForSequenceClassification.from_pretrained(
        path, ignore_mismatched_sizes=True, output_loading_info=True
    )
    assert [row[0] for row in report["mismatched_keys"]] == [name]
    assert torch.all(model.get_parameter(name) == 0)


def test_checkpoint_of_another_expert_count_is_an_error(checkpoint):
    path, _ = checkpoint
    with pytest.raises(RuntimeError, match="mismatch"):
        MoaBertForSequenceClassification.from_pretrained(path, mae_num_dropped_heads=2)


# --- packed rows ----------------------------------------------------------------------------------


def test_gates_refuse_rows_of_several_texts():
    ids = torch.randint(5, 67, (1, 9))
    packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    case = CASE["GPT2LMHeadModel"]
    for fields in ({}, {"attention_type": "moa"}, {"attention_type": "mae", "mae_gate_type": "uniform"}):
        output = case.build(**fields)(ids, position_ids=packed, use_cache=False).logits
        alone = case.build(**fields)(ids[:, 4:]).logits
        torch.testing.assert_close(output[:, 4:], alone, atol=1e-4, rtol=1e-4)
    model = case.build(attention_type="mae")
    with pytest.raises(
        ValueError, match=r"position_ids must go up by 1 .* \(got 3 and 0 beside each other\)"
    ):
        model(ids, position_ids=packed, use_cache=False)
    model(ids, position_ids=torch.arange(2, 11)[None], use_cache=False)
