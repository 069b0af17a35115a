"""Where `MoaTrainer` stops: updates that must not be made, and arguments that cannot work."""

import json
import math
import re

import pytest
import torch
from safetensors.torch import load_file
from training_runs import VARIANTS, assert_same, build, gates, rows, run, tensors, trainer
from transformers import TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from hf_moa.training import (
    MoaSeq2SeqTrainer,
    MoaTrainer,
    MoaTrainingArguments,
    TrainingDivergedError,
    evaluate_budgets,
    gate_parameters,
)


@pytest.mark.parametrize("variant", VARIANTS)
def test_divergence_stops_after_saving(variant, tmp_path):
    model = build("bert", **VARIANTS[variant])
    made = trainer("bert", model, tmp_path, max_steps=4, save_strategy="steps", save_steps=1)

    class Poison(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 2:
                made.before = {k: v.clone() for k, v in tensors(model).items()}
                made.args.push_to_hub = True
                layer = model.bert.embeddings.LayerNorm
                layer.register_forward_hook(lambda *a: a[-1] * float("nan"))

    made.add_callback(Poison())
    made.push_to_hub = lambda *a, **k: pytest.fail("pushed")
    with pytest.raises(TrainingDivergedError, match=r"step 2 .*learning_rate") as error:
        made.train()
    assert math.isnan(_losses_in(error.value)["loss"])
    if variant != "mha":
        assert ("gate" if variant.startswith("mae") else "router_z_loss") in str(error.value)
    now = {k: v for k, v in tensors(model).items() if "noise_scale" not in k}
    assert_same(now, {k: made.before[k] for k in now})  # the gates' running statistics too
    folder = tmp_path / "diverged-2"
    assert (folder / "model.safetensors").exists()
    assert json.loads((folder / "trainer_state.json").read_text())["global_step"] == 2
    assert get_last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-2")


def _losses_in(message):
    found = re.search(r"Last losses: (.*?)\. The model", str(message)).group(1)
    return {name: float(value) for name, value in (each.rsplit(" ", 1) for each in found.split(", "))}


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_loss_that_is_not_finite_stops_a_run_whatever_its_gradients(value, tmp_path):
    """A constant, which has none."""
    made = trainer("bert-lm", build("bert-lm"), tmp_path, gradient_accumulation_steps=2)
    losses = made.compute_loss
    made.compute_loss = lambda *args, **kwargs: losses(*args, **kwargs) + float(value)
    with pytest.raises(TrainingDivergedError, match=r"The loss is infinite or no number\. Last"):
        made.train()


@pytest.mark.parametrize("step", [0, 1])
def test_divergence_in_a_gate_step_names_its_own_losses(step, tmp_path):
    model = build("bert", attention_type="mae", cct_budgets=[1, 0.5])
    made = trainer(
        "bert", model, tmp_path, max_steps=2, train_sampling_strategy="sequential", learning_rate=0.1
    )
    seen = []

    class Poison(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == step:
                gate = next(p for name, p in model.named_parameters() if ".mixture.gate." in name)
                gate.register_hook(lambda gradient: gradient * float("nan"))
                model.register_forward_hook(lambda *call: seen.append(call[-1]))

    made.add_callback(Poison())
    with pytest.raises(TrainingDivergedError, match=f"in a G step at step {step} ") as error:
        made.train()
    (outputs,) = seen
    expected = {
        "budget_loss": outputs.aux_losses["budget_loss"],
        "task_loss": outputs.task_loss,
        "loss": outputs.loss,
    }
    assert _losses_in(error.value) == {
        name: pytest.approx(loss.item(), rel=1e-3) for name, loss in expected.items()
    }


def test_gates_of_a_diverged_run_are_those_before_the_update(tmp_path):
    """Though the update's G step had moved them already."""
    model = build("bert", attention_type="mae")
    before, moved = gates(model), []

    def diverge(*call):
        if model.mae_phase == "expert":
            moved.append(any(not torch.equal(p, before[name]) for name, p in gates(model).items()))
            return call[-1] * float("nan")
        return None

    model.bert.embeddings.LayerNorm.register_forward_hook(diverge)
    with pytest.raises(TrainingDivergedError, match="parameters that it had before this update"):
        run("bert", model, tmp_path)
    assert moved == [True]
    saved = load_file(tmp_path / "diverged-0" / "model.safetensors")
    assert_same({name: saved[name] for name in before}, before)


@pytest.mark.parametrize("name", ["bert", "gpt2"])
@pytest.mark.parametrize("training", ["bcd", "joint"])
def test_batch_without_labels_is_told_apart(name, training, tmp_path):
    data = [row | {"labels": torch.full_like(row["labels"], -100)} for row in rows(name)]
    made = trainer(name, build(name, attention_type="mae"), tmp_path, data=data, mae_training=training)
    with pytest.raises(TrainingDivergedError, match=r"no label to learn from.*diverged-0") as error:
        made.train()
    assert "learning_rate" not in str(error.value)
    assert (tmp_path / "diverged-0" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("fields", "arguments", "message"),
    [
        ({}, {"mae_training": "bcd"}, "mae_training='bcd' needs a model with MAE"),
        ({"attention_type": "moa"}, {"mae_training": "joint"}, "attention_type='moa'"),
        (
            {"attention_type": "mae", "mae_gate_type": "uniform"},
            {"mae_training": "bcd"},
            "mae_training='expert'",
        ),
        ({}, {"cct_noise_steps": 10}, "cct_noise_steps needs a model with CCT"),
        (
            {"attention_type": "mae"},
            {"max_steps": -1, "num_train_epochs": 0},
            r"num_train_epochs must be above 0 \(got 0\)",
        ),
    ],
)
def test_arguments_must_go_with_the_model(fields, arguments, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        trainer("bert", build("bert", **fields), tmp_path, **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"mae_training": "alternating"},
            "mae_training must be 'bcd', 'expert', 'joint'.*'alternating'",
        ),
        ({"gate_every_n_epochs": 0}, "gate_every_n_epochs must be .* (got 0)"),
        ({"gate_every_n_epochs": 1.5}, "gate_every_n_epochs"),
        ({"gate_learning_rate": -1.0}, "gate_learning_rate"),
        ({"gate_epoch_steps": 0}, "gate_epoch_steps must be an integer of at least 1, .* (got 0)"),
        ({"gate_epoch_steps": 2.5}, "gate_epoch_steps must be an integer of at least 1, .* (got 2.5)"),
        ({"gate_epoch_steps": True}, "gate_epoch_steps must be an integer of at least 1, .* (got True)"),
        ({"gate_epoch_steps": "2"}, "gate_epoch_steps must be an integer of at least 1, .* (got '2')"),
        ({"sync_gate_norm": "no"}, "sync_gate_norm must be True or False (got 'no')"),
        ({"router_global_balance": 1}, "router_global_balance must be True or False (got 1)"),
        (
            {"cct_noise_steps": float("inf")},
            "cct_noise_steps must be a whole number of steps, .* -1 for all of it (got inf)",
        ),
        ({"cct_noise_steps": float("nan")}, "cct_noise_steps must be .* (got nan)"),
        ({"cct_noise_steps": True}, "cct_noise_steps must be .* (got True)"),
        ({"cct_noise_steps": 0}, "cct_noise_steps"),
        ({"cct_noise_steps": 2.5}, "cct_noise_steps"),
        ({"cct_noise_steps": -2}, "cct_noise_steps"),
    ],
)
def test_bad_arguments_are_errors(arguments, message, tmp_path):
    message = message.replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(ValueError, match=message):
        MoaTrainingArguments(str(tmp_path), use_cpu=True, **arguments)


def test_frozen_gates_cannot_descend(tmp_path):
    model = build("bert", attention_type="mae").requires_grad_(False)
    model.classifier.requires_grad_(True)
    with pytest.raises(ValueError, match="all are frozen"):
        trainer("bert", model, tmp_path, mae_training="bcd")
    made = trainer("bert", model, tmp_path)
    assert made.mae_training == "joint"
    made.train()


@pytest.mark.parametrize("training", ["bcd", "expert"])
def test_gates_alone_cannot_descend_but_train(training, tmp_path):
    model = build("bert", attention_type="mae")
    learning = {id(parameter) for parameter in gate_parameters(model)}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in learning)
    with pytest.raises(ValueError, match="all else is frozen"):
        trainer("bert", model, tmp_path, mae_training=training)
    made, before = trainer("bert", model, tmp_path), gates(model)
    assert made.mae_training == "joint"
    made.train()
    assert any(not torch.equal(parameter, before[name]) for name, parameter in gates(model).items())


def test_plain_arguments_are_an_error(tmp_path):
    with pytest.raises(ValueError, match="MoaTrainingArguments"):
        MoaTrainer(model=build("bert"), args=TrainingArguments(str(tmp_path), use_cpu=True))
    with pytest.raises(ValueError, match=r"MoaSeq2SeqTrainingArguments \(got MoaTrainingArguments"):
        MoaSeq2SeqTrainer(model=build("t5"), args=MoaTrainingArguments(str(tmp_path), use_cpu=True))


def test_budget_for_a_model_without_cct_is_an_error(tmp_path):
    made = trainer("bert", build("bert"), tmp_path)
    with pytest.raises(ValueError, match="budgets"):
        evaluate_budgets(made, budgets=[0.5])
