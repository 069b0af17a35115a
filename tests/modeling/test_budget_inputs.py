"""How budgets reach CCT's gates beside control symbols: biases, and a full budget that is plain; and
gates that decide in training."""

import pytest
import torch
from common import assert_same_with_gradients, batch, hidden, randomize, tiny_config
from families import CASE, LANGUAGE_MODELS, main_output
from peft import get_peft_model
from transformers import GenerationConfig

from hf_moa import FTGConfig, MoaBertForSequenceClassification, MoaBertModel, upcycle
from hf_moa.modeling.cct.budgets import Budget
from hf_moa.modeling.cct.control import ControlNetwork
from hf_moa.modeling.cct.costs import budget_loss
from hf_moa.modeling.core import budget_switches

BUDGETS = {"bert": [1, 0.5, 0.33], "gpt2": [1, 0.5, 0.33], "t5": [[1, 1], [1, 0.5], [0.33, 1]]}
each_case = pytest.mark.parametrize("case", LANGUAGE_MODELS, ids=lambda case: case.family.name)


def network_of(**options):
    network = ControlNetwork(
        hidden_size=32, gate_hidden_size=16, num_gates=3, starts_open=False, **options
    )
    return randomize(network.double(), scale=0.5)


def logits_of(network, x, index=None):
    inner = torch.clamp(x @ network.dense.weight.T + network.dense.bias, min=0)
    logits = inner @ network.out.weight.T + network.out.bias
    if index is None:
        return logits
    each = [logits[b] + network.budget_bias[i] for b, i in enumerate(index.tolist())]
    return torch.stack(each)


# --- biases ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_bias_of_a_sequences_budget_is_added_to_its_gates_logits(training):
    network = network_of(num_budgets=4).train(training)
    x, _ = hidden()
    index = torch.tensor([2, 0, 2])
    actual = network(x, Budget(index, None))
    expected = torch.sigmoid(logits_of(network, x, index))
    if training:
        assert_same_with_gradients(actual, expected, [x, *network.parameters()])
    else:
        assert torch.equal(actual, (expected >= 0.5).double())
        assert 0 < actual.mean() < 1


def test_biases_start_at_zero_and_tell_budgets_apart():
    config = tiny_config(cct_budgets=[1, 0.5], cct_budget_bias=True, cct_control_symbols=False)
    model = MoaBertModel(config)
    biases = {n: p for n, p in model.named_parameters() if n.endswith("control.budget_bias")}
    assert {tuple(bias.shape) for bias in biases.values()} == {(2, 2), (2, 4)}  # attention, feed-forward
    assert len(biases) == 4
    assert all(not bias.any() for bias in biases.values())
    assert model.cct.control_symbols is None
    assert not any("control_symbols" in name for name in model.state_dict())
    ids, mask = batch()
    model.eval()
    fractions = {}
    with torch.no_grad():
        for bias in biases.values():
            bias[0], bias[1] = 50.0, -50.0
        for budget in (1, 0.5):
            fractions[budget] = model(ids, attention_mask=mask, budget=budget).compute_fraction.tolist()
        mixed = model(ids, attention_mask=mask, budget=torch.tensor([0.5, 1, 0.5])).compute_fraction
    assert fractions == {1: [1, 1, 1], 0.5: [0, 0, 0]}
    assert mixed.tolist() == [0, 1, 0]


def test_gates_with_biases_refuse_to_guess_a_budget():
    x, _ = hidden()
    with pytest.raises(ValueError, match="budget must be given"):
        network_of(num_budgets=2)(x)


def test_ftg_trains_biases():
    model = upcycle(CASE["BertForSequenceClassification"].build_plain(), cct_budgets=[1, 0.5])
    adapted = get_peft_model(model, FTGConfig())
    trained = {n for n, p in adapted.named_parameters() if p.requires_grad}
    assert sum(name.endswith("budget_bias") for name in trained) == 4
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if name in trained and name.endswith("budget_bias"):
                parameter.sub_(50)
    ids, mask = batch()
    base = adapted.get_base_model()
    fractions = adapted(ids, attention_mask=mask, budget=0.5).compute_fraction
    assert fractions.tolist() == [0, 0, 0]
    assert adapted(ids, attention_mask=mask, budget=1).compute_fraction.tolist() == [1, 1, 1]
    with adapted.disable_adapter():
        assert base(ids, attention_mask=mask, budget=0.5).compute_fraction.tolist() == [1, 1, 1]


# --- hard gates in training ------------------------------------------------------------------------


def test_hard_gates_decide_in_training_with_the_sigmoids_gradient():
    """Straight-through: g = [p >= 0.5] + p - stop_gradient(p), p = sigmoid(z + noise)."""
    network = network_of(num_budgets=2, is_hard=True).train()
    network.noise_scale.fill_(1.7)
    x, _ = hidden()
    index = torch.tensor([1, 0, 1])
    torch.manual_seed(3)
    actual = network(x, Budget(index, None))
    assert set(actual.unique().tolist()) == {0.0, 1.0}
    torch.manual_seed(3)
    noise = torch.randn(3, 7, 3, dtype=torch.float64)
    chance = torch.sigmoid(logits_of(network, x, index) + 1.7 * noise)
    assert_same_with_gradients(
        actual, (chance >= 0.5) + chance - chance.detach(), [x, *network.parameters()]
    )


def test_hard_gates_are_exactly_zero_and_one_in_every_dtype():
    for dtype in (torch.float32, torch.bfloat16):
        network = network_of(is_hard=True).to(dtype).train()
        assert set(network(torch.randn(2, 50, 32, dtype=dtype)).unique().tolist()) == {0.0, 1.0}


def test_compute_fraction_of_hard_gates_in_training_is_that_of_eval():
    config = tiny_config(
        cct_budgets=[0.8, 0.5],
        cct_budget_bias=True,
        cct_gate_training="hard",
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = randomize(MoaBertModel(config).double())
    ids, mask = batch()
    inputs = {"input_ids": ids, "attention_mask": mask, "budget": 0.5}
    trained, used = model.train()(**inputs), model.eval()(**inputs)
    assert 0 < used.compute_fraction.mean() < 1
    torch.testing.assert_close(trained.compute_fraction, used.compute_fraction)
    real = mask.bool()
    torch.testing.assert_close(trained.last_hidden_state[real], used.last_hidden_state[real])


# --- a full budget that is plain -------------------------------------------------------------------


def upcycled(case, **fields):
    """A gated model whose gates decide, and the plain one that its weights are those of."""
    plain = case.build_plain()
    model = upcycle(plain, cct_budgets=BUDGETS[case.family.name], **fields)
    names = dict(plain.named_parameters())
    gates = {n: p for n, p in model.named_parameters() if n not in names}
    assert gates
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for gate in gates.values():
            gate.add_(1.5 * torch.randn(gate.shape, generator=generator))
    return model, upcycle(plain, "mha")


@each_case
@pytest.mark.parametrize("symbols", [False, True], ids=["bias", "symbols"])
def test_full_budget_is_the_plain_model_to_the_bit(case, symbols):
    model, plain = upcycled(case, cct_control_symbols=symbols)
    assert model.config.cct_full_budget_is_plain
    calls = []
    for module in model.modules():
        if isinstance(module, ControlNetwork):
            module.dense.register_forward_hook(lambda *_: calls.append(1))
    inputs = case.inputs()
    expected = main_output(plain(**inputs))
    for execution in ("auto", "sparse", "dense"):
        model.set_cct_execution(execution)
        output = model(**inputs)
        assert torch.equal(main_output(output), expected)
        assert not calls  # gates are not computed
        for name in ("compute_fraction", "encoder_compute_fraction", "decoder_compute_fraction"):
            assert output.get(name) is None or output[name].tolist() == [1, 1, 1]
    full = BUDGETS[case.family.name][0]
    assert torch.equal(main_output(model(**inputs, budget=full)), expected)
    others = main_output(model(**inputs, budget=BUDGETS[case.family.name][-1]))
    assert calls
    assert not torch.allclose(others, expected, atol=1e-3)


@each_case
def test_sequences_with_other_budgets_stand_beside_plain_ones(case):
    model, plain = upcycled(case)
    model, plain = model.double(), plain.double()
    inputs = case.inputs()
    budgets = torch.tensor(BUDGETS[case.family.name])
    mixed = model(**inputs, budget=budgets)
    expected = main_output(plain(**inputs))
    torch.testing.assert_close(main_output(mixed)[0], expected[0], atol=1e-12, rtol=0)
    fraction = "decoder_compute_fraction" if case.family.name == "t5" else "compute_fraction"
    assert mixed[fraction][0] == 1
    assert not torch.allclose(main_output(mixed)[1], expected[1], atol=1e-3)
    for b, budget in enumerate(BUDGETS[case.family.name]):
        single = main_output(model(**inputs, budget=budget))
        torch.testing.assert_close(main_output(mixed)[b], single[b], atol=1e-12, rtol=0)


@each_case
@pytest.mark.parametrize("training", ["soft", "hard"])
def test_full_budget_is_plain_in_training_too(case, training):
    model, plain = upcycled(case, cct_gate_training=training)
    for each in (model, plain):
        each.double().train()
        for module in each.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
            elif hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.0
    batch = case.inputs() | case.labels()
    output = model(**batch, budget=1)
    expected = plain(**batch)
    torch.testing.assert_close(output.logits, expected.logits, atol=1e-12, rtol=0)
    torch.testing.assert_close(output.loss, expected.loss, atol=1e-12, rtol=0)
    assert output.aux_loss == 0
    output.loss.backward()
    expected.loss.backward()
    for name, parameter in plain.named_parameters():
        found = model.get_parameter(name).grad
        torch.testing.assert_close(found, parameter.grad, atol=1e-12, rtol=1e-9)
    for name, parameter in model.named_parameters():  # every one takes part in every step
        assert parameter.grad is not None, name
    plain_names = dict(plain.named_parameters())
    gates = [p for n, p in model.named_parameters() if n not in plain_names]
    assert gates
    assert not any(gate.grad.any() for gate in gates)


def test_plain_budget_of_t5_is_that_of_each_half():
    case = CASE["T5ForConditionalGeneration"]
    model, plain = upcycled(case)
    inputs = case.inputs()
    expected = plain(**inputs)
    output = model(**inputs, budget=(1, 0.5))
    assert torch.equal(output.encoder_last_hidden_state, expected.encoder_last_hidden_state)
    assert output.encoder_compute_fraction.tolist() == [1, 1, 1]
    assert (output.decoder_compute_fraction < 1).all()
    model.set_budget((1, 1))
    assert torch.equal(model(**inputs).logits, expected.logits)


def test_forced_gates_are_forced_at_the_full_budget():
    model, _ = upcycled(CASE["BertForMaskedLM"])
    inputs = CASE["BertForMaskedLM"].inputs()
    plain = model(**inputs).logits
    model.set_cct_gates(0.0)
    assert model(**inputs).compute_fraction.tolist() == [0, 0, 0]
    model.set_cct_gates(None)
    assert torch.equal(model(**inputs).logits, plain)


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "T5ForConditionalGeneration"])
def test_generation_at_the_full_budget_is_that_of_the_plain_model(name):
    case = CASE[name]
    model, plain = upcycled(case)
    inputs = {k: v[:1, :5] for k, v in case.inputs().items() if k != "decoder_input_ids"}
    options = {"max_new_tokens": 8, "do_sample": False, "output_logits": True}
    options["return_dict_in_generate"] = True
    expected = plain.generate(**inputs, **options)
    found = model.generate(**inputs, **options)
    assert torch.equal(found.sequences, expected.sequences)
    for one, other in zip(found.logits, expected.logits, strict=True):
        assert torch.equal(one, other)


# --- the budget loss -------------------------------------------------------------------------------


def test_budget_loss_is_the_papers_sum_over_budgets():
    used = torch.tensor([3.0, 8.0, 5.0, 2.0], dtype=torch.float64, requires_grad=True)
    full = torch.tensor([10.0, 10.0, 20.0, 8.0], dtype=torch.float64)
    actual = budget_loss(
        torch.stack([used, full], dim=-1),
        index=torch.tensor([0, 1, 1, 0]),
        budgets=[1.0, 0.5, 0.2],
        chances=[0.25, 0.5, 0.25],
    )
    expected = 0.0
    for budget, members, chance in ((1.0, [0, 3], 0.25), (0.5, [1, 2], 0.5)):
        spent, allowed = used[members].sum(), budget * full[members].sum()
        expected += len(members) / 4 / chance * (allowed - spent).abs() / allowed
    assert_same_with_gradients(actual, expected, [used])


def test_expected_budget_loss_over_draws_is_the_sum():
    """Over all draws of three sequences' budgets, where what a budget uses does not depend on them."""
    budgets, chances, shares = [1.0, 0.5, 0.2], [0.5, 0.3, 0.2], [0.9, 0.7, 0.3]
    full = torch.full((3,), 10.0, dtype=torch.float64)
    expected = 0.0
    for drawn in torch.cartesian_prod(*[torch.arange(3)] * 3):
        used = torch.tensor([10 * shares[i] for i in drawn.tolist()], dtype=torch.float64)
        cost = torch.stack([used, full], dim=-1)
        chance = torch.tensor(chances, dtype=torch.float64)[drawn].prod()
        expected += chance * budget_loss(cost, index=drawn, budgets=budgets, chances=chances)
    total = sum(abs(b - s) / b for b, s in zip(budgets, shares, strict=True))
    assert expected.item() == pytest.approx(total, rel=1e-12)


def classifier(**fields):
    torch.manual_seed(0)
    config = tiny_config(cct_budgets=[1, 1, 0.5, 0.25], **fields)
    return randomize(MoaBertForSequenceClassification(config).double(), seed=4).train()


@pytest.mark.parametrize(
    ("fields", "coefficient", "chances"),
    [
        ({}, 1 / 3, [0.5, 0.25, 0.25]),
        ({"cct_budget_loss_coef": 2.0}, 2.0, [0.5, 0.25, 0.25]),
        ({"cct_budget_loss": "mean"}, 1.0, [1.0, 1.0, 1.0]),
        ({"cct_budget_loss": "mean", "cct_budget_loss_coef": 2.0}, 2.0, [1.0, 1.0, 1.0]),
    ],
    ids=str,
)
def test_auxiliary_loss_is_the_weighted_sum(fields, coefficient, chances):
    model = classifier(**fields)
    ids, mask = batch()
    budgets = torch.tensor([0.25, 1.0, 0.25])
    output = model(ids, attention_mask=mask, labels=torch.tensor([0, 1, 2]), budget=budgets)
    used, full = output.compute_cost.double().unbind(dim=-1)
    expected = 0.0
    for budget, members, chance in ((1.0, [1], chances[0]), (0.25, [0, 2], chances[2])):
        spent, allowed = used[members].sum(), budget * full[members].sum()
        expected += len(members) / 3 / chance * (allowed - spent).abs() / allowed
    torch.testing.assert_close(output.aux_losses["budget_loss"], expected)
    torch.testing.assert_close(output.aux_loss.detach(), coefficient * expected)


def test_a_checkpoint_of_before_keeps_its_loss(tmp_path):
    """Its configuration lacks the fields, and its coefficient means what it meant."""
    model = classifier(cct_budget_loss="mean", cct_budget_loss_coef=0.7)
    new = ("cct_gate_training", "cct_budget_bias", "cct_control_symbols", "cct_full_budget_is_plain")
    old = {k: v for k, v in model.config.to_dict().items() if k not in (*new, "cct_budget_loss")}
    loaded = MoaBertForSequenceClassification(type(model.config).from_dict(old)).double().train()
    loaded.load_state_dict(model.state_dict())
    ids, mask = batch()
    losses = []
    for each in (model, loaded):
        torch.manual_seed(1)
        each.set_cct_noise_scale(1.0)
        output = each(ids, attention_mask=mask, labels=torch.tensor([0, 1, 2]))
        losses.append(torch.stack([output.loss, output.aux_loss]))
    assert torch.equal(*losses)


@each_case
@pytest.mark.parametrize("has_bias", [False, True], ids=["symbols", "biases"])
def test_budgets_of_a_checkpoint_stay(case, has_bias, tmp_path):
    """What .5 has learned would stand for .7."""
    fields = {"cct_budget_bias": has_bias, "cct_control_symbols": not has_bias}
    case.build(cct_budgets=[1, 0.5], **fields).save_pretrained(tmp_path)
    message = r"trained for, \[1, 0\.5\] \(got \[1, 0\.7\]\)"
    config = case.config(cct_budgets=[1, 0.7], **fields)
    for model_class in (case.gated, case.auto):
        for other in ({"cct_budgets": [1, 0.7]}, {"config": config}):
            with pytest.raises(ValueError, match=message):
                model_class.from_pretrained(tmp_path, **other)
        # drawn more often, and in other pairs
        for same in ([0.5, 1, 1], *([[[1, 0.5], [0.5, 1]]] if case.family.name == "t5" else [])):
            loaded = model_class.from_pretrained(tmp_path, cct_budgets=same)
            assert loaded.config.cct_budgets == same
    (tmp_path / "config.json").unlink()  # nothing says what the weights are of
    assert case.gated.from_pretrained(tmp_path, config=config).config.cct_budgets == [1, 0.7]


def test_budgets_of_a_plain_checkpoint_are_new(tmp_path):
    case = CASE["BertForSequenceClassification"]
    case.build_plain().save_pretrained(tmp_path)
    config = case.config(cct_budgets=[1, 0.7])
    assert case.gated.from_pretrained(tmp_path, config=config).config.cct_budgets == [1, 0.7]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_errors_say_budgets_as_they_were_given(dtype):
    case = CASE["BertForSequenceClassification"]
    model = case.build(cct_budgets=[1, 0.5])
    with pytest.raises(ValueError, match=r"\(got \[1\.0, 0\.7, 0\.5\]\)"):
        model(**case.inputs(), budget=torch.tensor([1, 0.7, 0.5], dtype=dtype))


def test_untrained_gates_are_said_once(monkeypatch):
    case = CASE["BertForSequenceClassification"]
    said = []
    monkeypatch.setattr(budget_switches.logger, "warning", said.append)
    model, inputs = upcycle(case.build_plain(), cct_budgets=[1, 0.5]), case.inputs()
    assert model(**inputs).compute_fraction.eq(1).all()
    assert not said  # nobody asked for less
    for _ in range(2):
        assert model(**inputs, budget=0.5).compute_fraction.eq(1).all()
    assert len(said) == 1
    assert "were never trained" in said[0]
    trained = upcycle(case.build_plain(), cct_budgets=[1, 0.5])
    for parameter in trained.parameters():
        parameter.data += 0.01
    trained(**inputs, budget=0.5)
    case.build(nested_budgets=[1, 0.5])(**inputs, budget=0.5)
    assert len(said) == 1


def test_generation_configuration_names_a_budget():
    """As `transformers serve` hands it on from a request's body; an argument goes first."""
    for name, fields, budget in (
        ("GPT2LMHeadModel", {"cct_budgets": [1, 0.5]}, 0.5),
        ("T5ForConditionalGeneration", {"cct_budgets": [[1, 1], [1, 0.5]]}, [1, 0.5]),
    ):
        model = CASE[name].build(**fields)
        ids = torch.arange(5, 11)[None]
        own = tuple(budget) if isinstance(budget, list) else budget
        expected, largest = (
            model.generate(ids, max_new_tokens=8, do_sample=False, budget=each) for each in (own, None)
        )
        assert not torch.equal(expected, largest)
        settings = GenerationConfig(max_new_tokens=8, do_sample=False, budget=budget)
        assert torch.equal(model.generate(ids, generation_config=settings), expected)
        assert torch.equal(model.generate(ids, settings), expected)
        first = 1 if own == 0.5 else (1, 1)
        assert torch.equal(model.generate(ids, generation_config=settings, budget=first), largest)
        settings.budget = 0.3
        with pytest.raises(ValueError, match="budget"):
            model.generate(ids, generation_config=settings)
