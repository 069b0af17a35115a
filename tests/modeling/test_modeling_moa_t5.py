"""What is particular to gated T5: two stacks, three kinds of attention, budgets in pairs."""

import pytest
import torch
from common import batch
from families import CASE, T5

from hf_moa.modeling.moe.feed_forward import _PortableExperts

LM = CASE["T5ForConditionalGeneration"]


# --- outputs of the halves ------------------------------------------------------------------------


def test_every_attention_has_its_own_gate():
    model = LM.build(attention_type="mae")
    output = model(**LM.inputs(), output_expert_weights=True)
    assert [tuple(w.shape) for w in output.encoder_expert_weights] == [(3, 4)] * 2
    assert [tuple(w.shape) for w in output.decoder_expert_weights] == [(3, 6, 4)] * 2
    assert [tuple(w.shape) for w in output.cross_expert_weights] == [(3, 6, 4)] * 2
    assert not torch.allclose(output.decoder_expert_weights[0], output.cross_expert_weights[0])
    names = [name for name, _ in model.named_modules() if name.endswith("mixture.gate")]
    assert len(names) == 2 * 3  # two layers: encoder, decoder, cross


def test_routers_are_reported_by_half():
    model = LM.build(attention_type="moa", num_attention_experts=6)
    output = model(**LM.inputs(), output_router_logits=True)
    assert [tuple(x.shape) for x in output.encoder_router_logits] == [(3, 9, 6)] * 2
    assert [tuple(x.shape) for x in output.decoder_router_logits] == [(3, 6, 6)] * 2
    assert [tuple(x.shape) for x in output.cross_router_logits] == [(3, 6, 6)] * 2
    halves = {name.split("_")[0] for name in output.aux_losses}
    assert halves == {"encoder", "decoder"}
    coefficients = {"router_balance_loss": 0.01, "router_z_loss": 0.001}
    expected = sum(
        coefficients.get(name.split("_", 1)[1], 0.0) * loss for name, loss in output.aux_losses.items()
    )
    torch.testing.assert_close(output.aux_loss, expected)
    assert model(**LM.inputs()).encoder_router_logits is None


def test_gates_of_cct_are_reported_by_half():
    model = LM.build(cct_budgets=[1, 0.5])
    output = model(**LM.inputs(), output_cct_gates=True)
    shapes = {name: tuple(gate.shape) for name, gate in output.encoder_cct_gates[0].items()}
    assert shapes == {"kv": (3, 9), "query": (3, 9), "ffn": (3, 9, 4)}
    shapes = {name: tuple(gate.shape) for name, gate in output.decoder_cct_gates[1].items()}
    cross = {"cross_kv": (3, 9), "cross_query": (3, 6)}
    assert shapes == {"kv": (3, 6), "query": (3, 6), "ffn": (3, 6, 4)} | cross


def test_compute_fraction_is_of_both_halves_together():
    model = LM.build(cct_budgets=[1, 0.5])
    output = model(**LM.inputs())
    inputs = LM.inputs()
    encoder = model.encoder(inputs["input_ids"], attention_mask=inputs["attention_mask"])
    torch.testing.assert_close(output.encoder_compute_fraction, encoder.compute_fraction)
    used = output.compute_cost[:, 0] / output.compute_cost[:, 1]
    torch.testing.assert_close(output.compute_fraction, used)
    low = torch.minimum(output.encoder_compute_fraction, output.decoder_compute_fraction)
    high = torch.maximum(output.encoder_compute_fraction, output.decoder_compute_fraction)
    assert torch.all((low <= output.compute_fraction) & (output.compute_fraction <= high))
    # an encoder's output that is handed in counts as much as one that is computed
    again = model(**inputs, encoder_outputs=encoder)
    torch.testing.assert_close(again.compute_fraction, output.compute_fraction)
    torch.testing.assert_close(again.aux_loss, output.aux_loss)
    assert again.encoder_hidden_states is None
    as_tuple = model(**inputs, encoder_outputs=(encoder.last_hidden_state,))
    assert torch.equal(as_tuple.logits, output.logits)


def test_compute_cost_counts_the_gated_activations_three_matrices():
    costs = {}
    for activation in ("relu", "gated-gelu"):
        model = LM.build(cct_budgets=[1], cct_sublayer_norm=False, feed_forward_proj=activation)
        ids = torch.randint(5, 67, (1, 4))
        costs[activation] = model.encoder(ids).compute_cost[0, 1].item()
    # two layers, four tokens, d * d_ff for the third matrix
    assert costs["gated-gelu"] - costs["relu"] == 2 * 4 * 32 * 48


# --- budgets --------------------------------------------------------------------------------------


def test_budget_is_a_number_a_pair_or_one_per_sequence():
    model = LM.build(cct_budgets=[1, 0.5])
    inputs = LM.inputs()
    pairs = {
        pair: model(**inputs, budget=pair).logits for pair in ((1, 1), (1, 0.5), (0.5, 1), (0.5, 0.5))
    }
    for pair, logits in pairs.items():
        for other, other_logits in pairs.items():
            assert torch.equal(logits, other_logits) == (pair == other)
    assert torch.equal(model(**inputs).logits, pairs[1, 1])
    assert torch.equal(model(**inputs, budget=0.5).logits, pairs[0.5, 0.5])
    assert torch.equal(model(**inputs, budget=[1, 0.5]).logits, pairs[1, 0.5])
    mixed = model(**inputs, budget=torch.tensor([0.5, 1, 0.5])).logits
    torch.testing.assert_close(mixed[1], pairs[1, 1][1], atol=1e-4, rtol=1e-5)
    mixed = model(**inputs, budget=torch.tensor([[0.5, 1], [1, 0.5], [1, 1]])).logits
    for b, pair in enumerate(((0.5, 1), (1, 0.5), (1, 1))):
        torch.testing.assert_close(mixed[b], pairs[pair][b], atol=1e-4, rtol=1e-5)
    model.set_budget((0.5, 1))
    assert torch.equal(model(**inputs).logits, pairs[0.5, 1])
    assert torch.equal(model(**inputs, budget=1).logits, pairs[1, 1])
    model.set_budget(None)
    assert torch.equal(model(**inputs).logits, pairs[1, 1])


@pytest.mark.parametrize(
    "budget",
    [0.7, (1, 0.7), (0.5, 1), [1], (1, 1, 1), "1", True, torch.tensor([1.0, 0.5, 0.3]), torch.ones(2)],
    ids=str,
)
def test_unknown_budget_names_the_list(budget):
    model = LM.build(cct_budgets=[[1, 1], [1, 0.5], [0.5, 0.5]])
    with pytest.raises(ValueError, match="budget"):
        model(**LM.inputs(), budget=budget)
    if not isinstance(budget, torch.Tensor):
        with pytest.raises(ValueError, match=r"\(1\.0, 1\.0\), \(1\.0, 0\.5\), \(0\.5, 0\.5\)"):
            model.set_budget(budget)


def test_budget_without_cct_is_an_error():
    with pytest.raises(ValueError, match="cct_budgets"):
        LM.build()(**LM.inputs(), budget=0.5)


def test_encoder_alone_takes_a_number():
    case = CASE["T5EncoderModel"]
    model = case.build(cct_budgets=[[1, 1], [0.5, 1], [0.5, 0.25]])
    inputs = case.inputs()
    assert model.config.stack_budgets == [1, 0.5, 0.5]
    low = model(**inputs, budget=0.5).last_hidden_state
    assert not torch.equal(low, model(**inputs, budget=1).last_hidden_state)
    for bad in ((1, 1), 0.25):
        with pytest.raises(ValueError, match=r"\[1\.0, 0\.5\]"):
            model(**inputs, budget=bad)


def test_training_draws_every_pair_alike():
    model = LM.build(cct_budgets=[[1, 1], [1, 1], [1, 0.5], [0.5, 0.25]]).train()
    drawn = []
    for stack in (model.encoder, model.decoder):
        stack.cct.register_forward_hook(lambda module, args, budget: drawn.append(budget.index))
    torch.manual_seed(0)
    ids, _ = batch(batch_size=400, length=2)
    model(ids, decoder_input_ids=ids)
    encoder, decoder = drawn
    pairs = list(zip(encoder.tolist(), decoder.tolist(), strict=True))
    assert set(pairs) == {(0, 0), (0, 1), (1, 2)}
    assert pairs.count((0, 0)) / 400 == pytest.approx(0.5, abs=0.08)
    assert pairs.count((1, 2)) / 400 == pytest.approx(0.25, abs=0.07)


def test_training_draws_the_pairs_of_what_is_encoded():
    model = LM.build(cct_budgets=[[1, 1], [1, 0.33], [0.5, 0.33], [0.5, 0.25], [0.5, 0.25]]).train()
    torch.manual_seed(0)
    ids, _ = batch(batch_size=600, length=2)
    encoded = model.encoder(ids)
    pairs = model(encoder_outputs=encoded, decoder_input_ids=ids).budget
    assert torch.equal(pairs[:, 0], encoded.budget)
    drawn = [(round(first, 4), round(second, 4)) for first, second in pairs.tolist()]
    assert set(drawn) == {(1, 1), (1, 0.33), (0.5, 0.33), (0.5, 0.25)}
    halves = drawn.count((0.5, 0.33)) + drawn.count((0.5, 0.25))
    assert drawn.count((0.5, 0.25)) / halves == pytest.approx(2 / 3, abs=0.08)


def test_coefficients_of_the_losses_are_those_of_the_models_config():
    model = LM.build(attention_type="moa", cct_budgets=[0.5]).train()
    inputs = LM.inputs()
    assert model(**inputs).aux_loss > 0
    for name in ("router_balance_loss_coef", "router_z_loss_coef", "cct_budget_loss_coef"):
        setattr(model.config, name, 0.0)
    assert model(**inputs).aux_loss == 0


# --- padding of the decoder -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mae-1", "moa", "moe", "cct"])
def test_positions_behind_the_last_label_count_nowhere(name):
    model = LM.build(**T5.variants[name] | T5.no_dropout).double().train()
    inputs = LM.inputs()
    del inputs["decoder_input_ids"]
    labels = LM.labels()["labels"]
    wider = torch.nn.functional.pad(labels, (0, 4), value=-100)
    outputs = []
    for targets in (labels, wider):
        torch.manual_seed(0)
        outputs.append(model(**inputs, labels=targets, budget=1 if "cct" in name else None))
    torch.testing.assert_close(outputs[1].loss, outputs[0].loss)
    if outputs[0].aux_loss is not None:
        torch.testing.assert_close(outputs[1].aux_loss, outputs[0].aux_loss)
    explicit = model(
        **inputs,
        labels=labels,
        decoder_attention_mask=torch.tensor([[1] * 6, [1] * 4 + [0] * 2, [1] * 6]),
        budget=1 if "cct" in name else None,
    )
    torch.testing.assert_close(explicit.loss, outputs[0].loss)


def test_labels_inside_the_sequence_may_be_missing():
    model = LM.build(attention_type="mae")
    inputs = LM.inputs()
    del inputs["decoder_input_ids"]
    labels = LM.labels()["labels"].clone()
    labels[:, 2] = -100
    seen = []
    model.decoder.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["padding_mask"]), with_kwargs=True
    )
    model(**inputs, labels=labels)
    assert seen[0].tolist() == [[True] * 6, [True] * 4 + [False] * 2, [True] * 6]


# --- heads ----------------------------------------------------------------------------------------


def test_classifier_needs_the_end_of_every_sequence():
    case = CASE["T5ForSequenceClassification"]
    model, inputs = case.build(), case.inputs()
    with pytest.raises(ValueError, match="input_ids"):
        model(inputs_embeds=torch.randn(3, 9, 32))
    inputs["input_ids"][1][inputs["input_ids"][1] == 1] = 7
    with pytest.raises(ValueError, match=r"sequences \[1\]"):
        model(**inputs)


def test_classifier_knows_several_ends():
    case = CASE["T5ForSequenceClassification"]
    inputs = case.inputs()
    expected = case.build()(**inputs).logits
    several = case.build(eos_token_id=[1, 66])
    assert torch.equal(several(**inputs).logits, expected)


@pytest.mark.parametrize("name", ["mae-1", "moa", "cct", "mae-cct"])
@pytest.mark.parametrize("recorded", [False, True])
def test_encoder_outputs_may_be_a_tuple(name, recorded):
    model, inputs = LM.build(**T5.variants[name]), LM.inputs()
    options = {"output_hidden_states": recorded, "output_attentions": recorded}
    model.set_attn_implementation("eager")
    encode = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    given = model.encoder(**encode, **options).to_tuple()
    expected = model(**inputs, **options)
    actual = model(**inputs, **options, encoder_outputs=given)
    torch.testing.assert_close(actual.logits, expected.logits)
    for field in ("encoder_hidden_states", "encoder_attentions"):
        if recorded:
            torch.testing.assert_close(actual[field], expected[field])
        else:
            assert field not in actual


def test_encoder_checkpoint_of_a_whole_model(tmp_path):
    model = LM.build(attention_type="mae", cct_budgets=[1, 0.5])
    model.save_pretrained(tmp_path)
    encoder, report = CASE["T5EncoderModel"].gated.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    inputs = CASE["T5EncoderModel"].inputs()
    expected = model.encoder(**inputs).last_hidden_state
    assert torch.equal(encoder(**inputs).last_hidden_state, expected)
    assert model.config.is_encoder_decoder
    assert not encoder.config.is_encoder_decoder


def test_config_of_the_user_is_left_alone():
    config = T5.config()
    CASE["T5EncoderModel"].gated(config)
    CASE["T5ForTokenClassification"].gated(config)
    assert config.is_encoder_decoder
    assert config.use_cache


def test_first_layer_alone_holds_the_position_bias():
    model = LM.build(attention_type="moa", num_attention_experts=6)
    tables = {name: p.shape for name, p in model.named_parameters() if "relative_attention" in name}
    assert set(tables.values()) == {(8, 6)}
    assert {name.split(".layer")[0] for name in tables} == {"encoder.block.0", "decoder.block.0"}


@pytest.mark.parametrize("name", ["mae-1", "cct", "cct-plain", "cct-gated-gelu"])
def test_half_precision_keeps_the_last_projection_in_full(name, tmp_path):
    LM.build(**T5.variants[name]).save_pretrained(tmp_path)
    half = LM.gated.from_pretrained(tmp_path, dtype=torch.float16)
    dtypes = {p.dtype for name, p in half.named_parameters() if ".wo." in name or ".down." in name}
    assert dtypes == {torch.float32}
    assert torch.isfinite(half(**LM.inputs()).logits).all()


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_experts_run_in_half_precision(implementation, tmp_path):
    model = LM.build(ffn_type="moe")
    model.save_pretrained(tmp_path)
    half = LM.gated.from_pretrained(tmp_path, dtype=torch.float16)
    half.set_experts_implementation(implementation)
    for name, parameter in half.named_parameters():
        wide = name.endswith("down_proj")
        assert parameter.dtype == (torch.float32 if wide else torch.float16), name
    expected = model(**LM.inputs()).logits
    torch.testing.assert_close(half(**LM.inputs()).logits.float(), expected, atol=0.1, rtol=0)
    all_half = half.half()  # casts every parameter, as in transformers
    assert {p.dtype for p in all_half.parameters()} == {torch.float16}
    torch.testing.assert_close(all_half(**LM.inputs()).logits.float(), expected, atol=0.1, rtol=0)


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("name", ["mha", "moe", "moe-gated-gelu"])
def test_half_precision_does_not_overflow(name, implementation, tmp_path):
    """As the dense T5's does not, whose last projection gives more than half precision can hold."""
    all_experts = {"num_ffn_experts": 3, "num_ffn_experts_per_token": 3}  # rounding chooses none
    model = LM.build(**T5.variants[name] | (all_experts if name != "mha" else {}))
    for key, parameter in model.named_parameters():
        if key.endswith((".wo.weight", "down_proj", "down.weight")):
            parameter.data *= 3e5
    model.save_pretrained(tmp_path)
    half = LM.gated.from_pretrained(tmp_path, dtype=torch.float16)
    for each in (model, half):
        each.set_experts_implementation(implementation)
    hidden = half.encoder(LM.inputs()["input_ids"], output_hidden_states=True).hidden_states
    assert max(state.abs().max() for state in hidden[:-1]) > 65504
    actual, expected = half(**LM.inputs()).logits.float(), model(**LM.inputs()).logits
    scale = expected.abs().max().item()
    torch.testing.assert_close(actual, expected, atol=0.05 * scale, rtol=0)


def test_implementation_of_experts_reaches_both_stacks(monkeypatch):
    original, used = _PortableExperts.get_interface, []

    def record(self, implementation, default):
        used.append(implementation)
        return original(self, implementation, default)

    monkeypatch.setattr(_PortableExperts, "get_interface", record)
    model = LM.build(ffn_type="moe")
    for implementation in ("eager", "batched_mm", {"": "grouped_mm"}):
        used.clear()
        model.set_experts_implementation(implementation)
        model(**LM.inputs())
        name = implementation[""] if isinstance(implementation, dict) else implementation
        assert used == [name] * 4


def test_exactly_one_of_ids_and_embeddings():
    model = LM.build()
    ids, _ = batch()
    with pytest.raises(ValueError, match="decoder_input_ids"):
        model(ids)
    with pytest.raises(ValueError, match="input_ids"):
        model(decoder_input_ids=ids)
    with pytest.raises(ValueError, match="use_cache"):
        model.encoder(ids, use_cache=True)
