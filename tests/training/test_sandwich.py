"""Every budget in every step: gradients, the model as its own teacher, logs, and what is refused."""

import pytest
import torch
from common import VARIANTS
from training_runs import (
    PLAIN_SGD,
    assert_same,
    build,
    logged,
    rows,
    run,
    tensors,
    trainer,
    uneven_rows,
)

from hf_moa import MoaT5Config
from hf_moa.training import MoaTrainer

# nothing is drawn: gates without noise, models without dropout
FIELDS = {"cct_budget_loss_coef": 1.0, "cct_budgets": [1, 0.5, 0.25], "cct_noise_max": 0.0}
SHARES = {
    "bert": {1: 1 / 3, 0.5: 1 / 3, 0.25: 1 / 3},
    "bert-lm": {1: 1 / 3, 0.5: 1 / 3, 0.25: 1 / 3},
    "gpt2": {1: 1 / 3, 0.5: 1 / 3, 0.25: 1 / 3},
    "t5": {(1, 1): 0.5, (1, 0.5): 0.25, (0.5, 0.25): 0.25},
}
WEIGHT, TEMPERATURE, HIDDEN = 0.3, 1.7, 0.6
SETTINGS = {
    "distillation_weight": WEIGHT,
    "distillation_temperature": TEMPERATURE,
    "distillation_hidden_weight": HIDDEN,
}


def build_with_budgets(name, **fields):
    pairs = {"cct_budgets": [[1, 1], [1, 0.5], [1, 1], [0.5, 0.25]]} if name == "t5" else {}
    return build(name, **FIELDS | pairs | fields)


def whole_batch(made):
    return made.data_collator([made.train_dataset[i] for i in range(8)])


def step_of(model, losses):
    """What an update of plain SGD at the rate 1 adds to the parameters."""
    model.zero_grad()
    sum(share * loss for share, loss in losses).backward()
    return {n: torch.zeros_like(p) if p.grad is None else -p.grad for n, p in model.named_parameters()}


def assert_stepped(before, model, step):
    for name, parameter in model.named_parameters():
        moved = parameter.detach() - before[name]
        torch.testing.assert_close(moved, step[name], atol=1e-9, rtol=1e-7, msg=name)


@pytest.mark.parametrize("name", SHARES)
def test_the_gradient_is_the_mean_over_budgets(name, tmp_path):
    """Weighted by how often the list has them."""
    model = build_with_budgets(name).double().train()
    made = trainer(name, model, tmp_path, budget_sampling="all", per_device_train_batch_size=8,
                   **PLAIN_SGD)  # fmt: skip
    inputs = whole_batch(made)
    losses = [(s, model(**inputs, budget=b).loss) for b, s in SHARES[name].items()]
    step, before = step_of(model, losses), {n: p.detach().clone() for n, p in model.named_parameters()}
    made.train()
    assert_stepped(before, model, step)


def test_repeats_are_weights(tmp_path):
    model = build("bert", cct_budgets=[1, 0.5, 0.5, 0.5], cct_noise_max=0.0).double().train()
    made = trainer("bert", model, tmp_path, budget_sampling="all", per_device_train_batch_size=8,
                   **PLAIN_SGD)  # fmt: skip
    inputs = whole_batch(made)
    losses = [(s, model(**inputs, budget=b).loss) for b, s in ((1, 0.25), (0.5, 0.75))]
    step, before = step_of(model, losses), {n: p.detach().clone() for n, p in model.named_parameters()}
    made.train()
    assert_stepped(before, model, step)


def test_numbers_of_an_encoder_decoder_are_its_pairs():
    """As those that training draws."""
    config = MoaT5Config(cct_budgets=[1, 0.5])
    assert config.budget_shares == {(1, 1): 0.25, (1, 0.5): 0.25, (0.5, 1): 0.25, (0.5, 0.5): 0.25}
    assert next(iter(config.budget_shares)) == (1, 1)
    assert MoaT5Config().budget_shares == {}


@pytest.mark.parametrize("name", SHARES)
def test_the_largest_budget_teaches_the_others(name, tmp_path):
    """Its own loss is that of labels; no gradient comes back from the others."""
    model = build_with_budgets(name).double().train()
    made = trainer(name, model, tmp_path, teacher="self", per_device_train_batch_size=8,
                   **SETTINGS, **PLAIN_SGD)  # fmt: skip
    assert made.budget_sampling == "all"
    inputs = whole_batch(made)

    def kl(s, t):
        p, log_p, log_q = (
            (t / TEMPERATURE).softmax(-1),
            *((x / TEMPERATURE).log_softmax(-1) for x in (t, s)),
        )
        return TEMPERATURE**2 * (p * (log_p - log_q)).sum(-1).mean()

    def states(outputs):
        if name == "t5":
            return outputs.encoder_hidden_states[-1], outputs.decoder_hidden_states[-1]
        return (outputs.hidden_states[-1],)

    def logits(outputs):
        if name == "bert":
            return outputs.logits
        return outputs.logits[:, :-1] if name == "gpt2" else outputs.logits

    (largest, share), *others = SHARES[name].items()
    teacher = model(**inputs, budget=largest, output_hidden_states=True)
    losses = [(share, teacher.loss)]
    for budget, share in others:
        outputs = model(**inputs, budget=budget, output_hidden_states=True)
        errors = [
            (h - t.detach()).square().sum() / t.detach().square().sum()
            for h, t in zip(states(outputs), states(teacher), strict=True)
        ]
        loss = (1 - WEIGHT) * outputs.task_loss + outputs.loss - outputs.task_loss
        loss = loss + WEIGHT * kl(logits(outputs), logits(teacher).detach())
        losses.append((share, loss + HIDDEN * sum(errors) / len(errors)))
    step, before = step_of(model, losses), {n: p.detach().clone() for n, p in model.named_parameters()}
    made.train()
    assert_stepped(before, model, step)


@pytest.mark.parametrize("teacher", [None, "other", "self"])
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_accumulation_changes_no_gradient(name, teacher, tmp_path):
    """Hidden states and the budget loss, ratios of a micro-batch each, left out."""
    models = []
    logits_only = {} if teacher is None else {"distillation_hidden_weight": 0.0}
    for batch_size, accumulation in ((8, 1), (2, 4)):
        model = build_with_budgets(name, cct_budget_loss_coef=0.0)
        given = build(name, seed=5) if teacher == "other" else teacher
        run(name, model, tmp_path, teacher=given, data=list(uneven_rows(name)), budget_sampling="all",
            per_device_train_batch_size=batch_size, gradient_accumulation_steps=accumulation,
            **logits_only, **PLAIN_SGD)  # fmt: skip
        models.append(model.state_dict())
    for key, tensor in models[0].items():
        torch.testing.assert_close(models[1][key], tensor, atol=3e-5, rtol=1e-5, msg=key)


def test_one_budget_is_as_if_it_were_drawn(tmp_path):
    """To the bit."""
    models = []
    for sampling in ("draw", "all"):
        model = build("bert", cct_budgets=[0.5], cct_noise_max=0.0)
        run("bert", model, tmp_path, budget_sampling=sampling, max_steps=3)
        models.append(tensors(model))
    assert_same(models[0], models[1])


def test_a_teacher_answers_once_for_all_budgets(tmp_path):
    teacher, calls, budgets = build("bert", seed=5), [], []
    teacher.register_forward_hook(lambda *_: calls.append(1))
    model = build_with_budgets("bert")
    model.register_forward_pre_hook(
        lambda module, args, kwargs: budgets.append(kwargs["budget"]), with_kwargs=True
    )
    run("bert", model, tmp_path, teacher=teacher, budget_sampling="all", max_steps=2,
        gradient_accumulation_steps=2, per_device_train_batch_size=2)  # fmt: skip
    assert len(calls) == 4
    assert budgets == 4 * [1, 0.5, 0.25]


@pytest.mark.parametrize("name", ["bert", "bert-lm"])
def test_logs_are_of_all_budgets_and_of_each(name, tmp_path):
    model = build_with_budgets(name)
    made = run(name, model, tmp_path, teacher="self", max_steps=2, logging_strategy="steps",
               logging_steps=1, gradient_accumulation_steps=2, per_device_train_batch_size=2,
               learning_rate=0.0, distillation_hidden_weight=1.0)  # fmt: skip
    for entry in logged(made):
        per_budget = [entry[f"task_loss_{budget}"] for budget in ("1", "0.5", "0.25")]
        assert entry["task_loss"] == pytest.approx(sum(per_budget) / 3, rel=1e-5)
        taught = [
            0.5 * entry[f"task_loss_{b}"] + 0.5 * entry[f"logits_loss_{b}"] + entry[f"hidden_loss_{b}"]
            for b in ("0.5", "0.25")
        ]
        loss = (entry["task_loss_1"] + sum(taught)) / 3 + entry["budget_loss"]
        assert entry["loss"] == pytest.approx(loss, rel=1e-4)
        assert "logits_loss_1" not in entry
        assert {f"compute_fraction_{budget}" for budget in ("1", "0.5", "0.25")} <= set(entry)


@pytest.mark.parametrize("training", ["bcd", "joint"])
def test_gates_of_mae_are_trained_at_all_budgets(training, tmp_path):
    model, calls = build("bert", attention_type="mae", **FIELDS), []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append((module.mae_phase, kwargs["budget"])), with_kwargs=True
    )
    run("bert", model, tmp_path, budget_sampling="all", mae_training=training)
    phases = ["gate", "expert"] if training == "bcd" else ["mixture"]
    assert calls == [(phase, budget) for phase in phases for budget in (1, 0.5, 0.25)]


def test_gradient_checkpointing_changes_nothing(tmp_path):
    models = []
    for checkpointing in (False, True):
        model = build("bert", dropout=True, **VARIANTS["mae-cct"])
        run("bert", model, tmp_path, max_steps=2, teacher="self", mae_training="joint",
            gradient_checkpointing=checkpointing, **PLAIN_SGD)  # fmt: skip
        models.append(tensors(model))
    for key, tensor in models[0].items():
        torch.testing.assert_close(models[1][key], tensor, atol=1e-6, rtol=1e-5, msg=key)


@pytest.mark.nightly
def test_compiled_model_trains_the_same(tmp_path):
    torch._dynamo.reset()
    losses = {}
    for backend in (None, "aot_eager"):
        model = build("bert", num_hidden_layers=1, cct_budgets=[1, 0.5], cct_noise_max=0.0)
        made = run("bert", model, tmp_path, torch_compile_backend=backend, max_steps=2,
                   teacher="self", logging_strategy="steps", logging_steps=1)  # fmt: skip
        losses[backend] = [entry["loss"] for entry in logged(made)]
    assert losses["aot_eager"] == pytest.approx(losses[None], rel=1e-5)


def test_how_budgets_are_sampled(tmp_path):
    assert trainer("bert", build("bert"), tmp_path).budget_sampling is None
    assert trainer("bert", build_with_budgets("bert"), tmp_path).budget_sampling == "draw"
    other = trainer("bert", build_with_budgets("bert"), tmp_path, teacher=build("bert", seed=5))
    assert other.budget_sampling == "draw"


@pytest.mark.parametrize(
    ("fields", "arguments", "message"),
    [
        ({}, {"budget_sampling": "all"}, "budget_sampling='all' needs a model with budgets"),
        ({}, {"budget_sampling": "draw"}, "budget_sampling='draw' needs a model with budgets"),
        (FIELDS, {"budget_sampling": "draw", "teacher": "self"}, "and budget_sampling='all'"),
        ({"cct_budgets": [1]}, {"teacher": "self"}, r"needs a model with several.*got budgets \[1\]"),
        (
            FIELDS,
            {"teacher": "self", "distillation_cache": True, "distillation_hidden_weight": 0},
            "distillation_cache needs a teacher that stays",
        ),
    ],
)
def test_what_does_not_go_together(fields, arguments, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        trainer("bert", build("bert", **fields), tmp_path, **arguments)


def test_data_must_hold_no_budget(tmp_path):
    data = [row | {"budget": torch.tensor(0.5)} for row in rows("bert")]
    made = trainer("bert", build_with_budgets("bert"), tmp_path, data=data, budget_sampling="all",
                   remove_unused_columns=False)  # fmt: skip
    with pytest.raises(ValueError, match="must hold no `budget`"):
        made.train()


def test_deepspeed_is_refused(tmp_path):
    made = trainer("bert", build_with_budgets("bert"), tmp_path)
    assert isinstance(made, MoaTrainer)
    made.args.budget_sampling, made.is_deepspeed_enabled = "all", True
    with pytest.raises(ValueError, match="which DeepSpeed would take for several steps"):
        made._check_budget_sampling()
