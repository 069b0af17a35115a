"""`MoaTrainer`: exact accumulation and resumption; its losses, logs, checkpoints and errors."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from families import CASE
from safetensors.torch import load_file
from training_runs import (
    CLASSES,
    PLAIN_SGD,
    assert_same,
    build,
    experts,
    gates,
    rows,
    run,
    trainer,
)
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint

from hf_moa.training import (
    MoaSeq2SeqTrainer,
    MoaTrainer,
    MoaTrainingArguments,
    TrainingDivergedError,
    evaluate_budgets,
    written_whole,
)
from hf_moa.training.checkpoints import discard_unfinished, stage

Z_LOSS_ALONE = {  # the balance loss, a product of two means, is no sum over micro-batches
    "attention_type": "moa",
    "router_balance_loss_coef": 0.0,
    "router_z_loss_coef": 1.0,
}
VARIANTS = {
    "mha": {},
    "mae": {"attention_type": "mae"},
    "moa": {"attention_type": "moa", "router_type": "noisy_topk", "ffn_type": "moe"},
    "mae-cct": {"attention_type": "mae", "cct_budgets": [1, 0.5]},
}


# --- exactness ------------------------------------------------------------------------------------


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("fields", [{}, Z_LOSS_ALONE], ids=["mha", "moa"])
@pytest.mark.parametrize("name", CLASSES)
def test_accumulation_changes_no_gradient(name, fields, smoothing, tmp_path):
    models = []
    for batch_size, accumulation in ((8, 1), (4, 2), (2, 4)):
        model = build(name, **fields)
        run(
            name,
            model,
            tmp_path,
            per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=accumulation,
            label_smoothing_factor=smoothing,
            **PLAIN_SGD,
        )
        models.append(model.state_dict())
    for other in models[1:]:
        for key, tensor in models[0].items():
            torch.testing.assert_close(other[key], tensor, atol=3e-5, rtol=1e-5, msg=key)


class _StopAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == self.step


@pytest.mark.parametrize("stop", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("variant", VARIANTS)
def test_resumption_is_bit_exact(variant, stop, tmp_path):
    """Weights, buffers, optimiser, schedule and noise; the data's order too, since they follow."""
    settings = {
        "num_train_epochs": 3,
        "max_steps": -1,
        "gate_every_n_epochs": 2,
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "warmup_steps": 2,
        "max_grad_norm": 0.5,
        "save_strategy": "steps",
        "save_steps": 1,
        "save_only_model": False,
    }
    fields = VARIANTS[variant]
    whole = build("bert", dropout=True, **fields)
    reference = run("bert", whole, tmp_path / "whole", **settings)
    assert reference.state.global_step == 6
    stopped = trainer("bert", build("bert", dropout=True, **fields), tmp_path / "parts", **settings)
    stopped.add_callback(_StopAt(stop))
    stopped.train()
    resumed = trainer(
        "bert", build("bert", dropout=True, seed=7, **fields), tmp_path / "parts", **settings
    )
    torch.rand(5)  # the process has a past of its own
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 6
    assert_same(_tensors(resumed.model), _tensors(whole))
    assert_same(_optimizer_state(resumed), _optimizer_state(reference))
    assert resumed.lr_scheduler.state_dict() == reference.lr_scheduler.state_dict()


@pytest.mark.parametrize("stop", [2, 4, 5])
def test_resumption_after_an_evaluation_is_bit_exact(stop, whole_with_evaluations, tmp_path):
    """2 and 4 are the last updates of an epoch: the evaluation comes after the checkpoint there, and the
    resumed run does not repeat it."""
    whole, settings, folder = whole_with_evaluations
    (tmp_path / "parts").mkdir()
    shutil.copytree(folder / f"checkpoint-{stop}", tmp_path / "parts" / f"checkpoint-{stop}")
    model = build("bert", dropout=True, seed=7, **VARIANTS["mae"])
    resumed = trainer("bert", model, tmp_path / "parts", **settings)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 6
    assert_same(_tensors(resumed.model), _tensors(whole.model))


@pytest.fixture(scope="module")
def whole_with_evaluations(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    settings = {
        "num_train_epochs": 3,
        "max_steps": -1,
        "gate_every_n_epochs": 2,
        "learning_rate": 1e-2,
        "save_strategy": "steps",
        "save_steps": 1,
        "eval_strategy": "epoch",
    }
    model = build("bert", dropout=True, **VARIANTS["mae"])
    return run("bert", model, folder, **settings), settings, folder


def _tensors(model):
    return dict([*model.named_parameters(), *model.named_buffers()])


def _optimizer_state(made):
    state = made.optimizer.state_dict()["state"]
    return {(i, name): value for i, entry in state.items() for name, value in entry.items()}


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradient_checkpointing_changes_nothing(variant, tmp_path):
    models = []
    for checkpointing in (False, True):
        model = build("bert", dropout=True, **VARIANTS[variant])
        run("bert", model, tmp_path, max_steps=3, gradient_checkpointing=checkpointing, **PLAIN_SGD)
        models.append(_tensors(model))
    for key, tensor in models[0].items():  # statistics of batch normalisation included
        torch.testing.assert_close(models[1][key], tensor, atol=1e-6, rtol=1e-5, msg=key)


def test_bfloat16_trains_as_float32_does(tmp_path):
    """Up to its precision: nothing is drawn but the budgets, which are the same. In small steps, so that
    the first update's rounding does not grow."""
    losses = {}
    for bf16 in (False, True):
        made = run(
            "bert",
            build("bert", **VARIANTS["mae-cct"]),
            tmp_path,
            bf16=bf16,
            mae_training="joint",
            max_steps=4,
            learning_rate=1e-3,
            logging_strategy="steps",
            logging_steps=1,
            logging_nan_inf_filter=False,
        )
        losses[bf16] = [entry["loss"] for entry in _logged(made)]
    assert losses[True] != losses[False]
    assert losses[True] == pytest.approx(losses[False], rel=1e-2)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("training", ["bcd", "joint"])
def test_clipping_is_of_all_that_the_optimiser_has(training, accumulation, tmp_path):
    """In block coordinate descent, of the experts alone: the gates' step is as long as it is."""
    model = build("bert", dropout=True, **VARIANTS["mae"])
    before = {"experts": experts(model), "gates": gates(model)}
    run("bert", model, tmp_path, mae_training=training, gradient_accumulation_steps=accumulation,
        **PLAIN_SGD | {"max_grad_norm": 0.01})  # fmt: skip
    after = {"experts": experts(model), "gates": gates(model)}
    moved = {
        part: math.hypot(*(float((after[part][name] - p).norm()) for name, p in before[part].items()))
        for part in before
    }
    if training == "bcd":
        assert moved["experts"] == pytest.approx(0.01, rel=1e-4)
        assert moved["gates"] > 0.1
    else:
        assert math.hypot(*moved.values()) == pytest.approx(0.01, rel=1e-4)
        assert moved["gates"] > 0


# --- losses ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("fields", [{}, {"attention_type": "moa"}], ids=["mha", "moa"])
@pytest.mark.parametrize("name", CLASSES)
def test_smoothed_loss_is_the_definition(name, fields, training, tmp_path):
    """`(1 - e) * nll + e * mean(-log p)` over the labels, shifted where the model shifts them; in eval
    `nll`, so that losses compare."""
    model = build(name, **fields).double().train(training)
    made = trainer(name, model, tmp_path, label_smoothing_factor=0.2)
    inputs = made.data_collator(list(rows(name)))
    if name != "bert":
        inputs["labels"][2, 5:] = -100
    actual = made.compute_loss(model, dict(inputs))
    outputs = model(**inputs)
    logits, labels = outputs.logits, inputs["labels"]
    if name == "gpt2":
        logits, labels = logits[:, :-1], labels[:, 1:]
    valid = labels != -100
    log_p = logits.log_softmax(-1)[valid]
    nll = -log_p.gather(-1, labels[valid].unsqueeze(-1)).mean()
    expected = 0.8 * nll + 0.2 * (-log_p).mean() if training else nll
    if fields and training:
        expected = expected + outputs.aux_loss
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_smoothing_of_a_plain_model_is_the_plain_trainers(accumulation, tmp_path):
    updates = []
    for trainer_class, arguments_class in (
        (MoaTrainer, MoaTrainingArguments),
        (Trainer, TrainingArguments),
    ):
        torch.manual_seed(0)
        model = plain_classifier(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        arguments = arguments_class(
            str(tmp_path), max_steps=1, use_cpu=True, report_to="none", save_strategy="no",
            per_device_train_batch_size=8 // accumulation, label_smoothing_factor=0.3,
            gradient_accumulation_steps=accumulation, **PLAIN_SGD,
        )  # fmt: skip
        trainer_class(model, arguments, train_dataset=list(rows("bert"))).train()
        updates.append(model.state_dict())
    for key, tensor in updates[0].items():
        torch.testing.assert_close(tensor, updates[1][key], atol=1e-6, rtol=1e-5, msg=key)


def plain_classifier(**fields):
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    return BertForSequenceClassification(BertConfig(vocab_size=67, num_labels=3, **sizes, **fields))


def test_smoothing_needs_labels(tmp_path):
    model = CASE["BertForQuestionAnswering"].build()
    data = [
        {"input_ids": row["input_ids"], "start_positions": 1, "end_positions": 2} for row in rows("bert")
    ]
    made = trainer("bert", model, tmp_path, data=data, label_smoothing_factor=0.1)
    with pytest.raises(ValueError, match="label_smoothing_factor needs `labels`"):
        made.train()


@pytest.mark.parametrize("accumulation", [1, 2])
def test_loss_function_of_the_user_has_auxiliary_losses_beside_it(accumulation, tmp_path):
    """A function that is the model's own loss gives the model's own updates."""

    def token_mean(outputs, labels, num_items_in_batch=None):
        total = torch.nn.functional.cross_entropy(
            outputs["logits"].flatten(0, 1), labels.flatten(), reduction="sum"
        )
        return total / num_items_in_batch

    models = []
    for function in (None, token_mean):
        model = build("bert-lm", **Z_LOSS_ALONE)
        made = trainer("bert-lm", model, tmp_path, gradient_accumulation_steps=accumulation, **PLAIN_SGD)
        if function is not None:
            made = MoaTrainer(
                model, made.args, train_dataset=made.train_dataset, compute_loss_func=function
            )
        made.train()
        models.append(model.state_dict())
    for key, tensor in models[0].items():
        torch.testing.assert_close(models[1][key], tensor, atol=2e-5, rtol=1e-5, msg=key)


def test_smoothing_needs_classes(tmp_path):
    model = build("bert", num_labels=1)
    data = [row | {"labels": torch.tensor(0.5)} for row in rows("bert")]
    made = trainer("bert", model, tmp_path, data=data, label_smoothing_factor=0.1)
    with pytest.raises(ValueError, match="label_smoothing_factor"):
        made.train()


# --- logs -----------------------------------------------------------------------------------------


def _logged(made):
    return [entry for entry in made.state.log_history if "loss" in entry]


def test_logs_of_routers(tmp_path):
    model = build("bert-lm", **VARIANTS["moa"])
    made = run(
        "bert-lm",
        model,
        tmp_path,
        max_steps=2,
        logging_strategy="steps",
        logging_steps=1,
        gradient_accumulation_steps=2,
        **PLAIN_SGD | {"learning_rate": 0.0},
    )
    first, second = _logged(made)
    names = {"router_balance_loss", "router_z_loss", "router_importance_loss", "router_load_loss"}
    assert {*names, "task_loss", "expert_load_max", "feed_forward_expert_load_min"} <= set(first)
    coefficients = {"router_balance_loss": 0.01, "router_z_loss": 0.001}
    aux = sum(coefficient * first[key] for key, coefficient in coefficients.items())
    assert first["loss"] == pytest.approx(first["task_loss"] + aux, rel=1e-4)
    assert first["expert_load_max"] >= 1 >= first["expert_load_min"]
    assert first["router_z_loss"] != second["router_z_loss"]  # noise


def test_logs_of_gates_and_compute(tmp_path):
    model = build("t5", attention_type="mae", cct_budgets=[[1, 1], [1, 0.5]])
    made = run("t5", model, tmp_path, max_steps=4, logging_strategy="steps", logging_steps=2)
    for entry in _logged(made):
        for half in ("encoder", "decoder", "cross"):
            assert 0 < entry[f"{half}_gate_entropy"] <= math.log(4) + 1e-6
        assert 0 <= entry["compute_fraction_1_1"] <= 1
        assert 0 <= entry["compute_fraction_1_0.5"] <= 1
        total = entry["encoder_budget_loss"] + entry["decoder_budget_loss"]
        assert entry["loss"] == pytest.approx(entry["task_loss"] + total, rel=1e-4)


def test_noise_grows_with_the_steps(tmp_path):
    model, scales = build("bert", cct_budgets=[1, 0.5]), []
    module = model.bert.encoder.layer[0].attention.self.cct.control
    model.register_forward_pre_hook(lambda *_: scales.append(float(module.noise_scale)))
    run("bert", model, tmp_path, max_steps=5, cct_noise_steps=4)
    assert scales == [0.0, 1.25, 2.5, 3.75, 5.0]
    scales.clear()
    run("bert", model, tmp_path, max_steps=4, cct_noise_steps=0.5)
    assert scales == [0.0, 2.5, 5.0, 5.0]


# --- checkpoints ----------------------------------------------------------------------------------


def test_best_model_is_loaded_and_the_limit_kept(tmp_path):
    model = build("bert", attention_type="mae")
    made = trainer(
        "bert",
        model,
        tmp_path,
        max_steps=4,
        save_strategy="steps",
        save_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        greater_is_better=True,  # so that the first is the best
        learning_rate=1e-2,
    )
    made.train()
    best = Path(made.state.best_model_checkpoint)
    losses = {e["step"]: e["eval_loss"] for e in made.state.log_history if "eval_loss" in e}
    assert best == tmp_path / f"checkpoint-{max(losses, key=losses.get)}"
    assert {p.name for p in tmp_path.iterdir()} == {best.name, "checkpoint-4"}
    state = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == str(best)
    assert made.evaluate()["eval_loss"] == pytest.approx(max(losses.values()), rel=1e-5)


def test_interrupted_replacement_of_a_checkpoint_is_undone(tmp_path):
    with written_whole(tmp_path / "checkpoint-1") as folder:
        (folder / "file").write_text("old")
    staged = stage(tmp_path / "checkpoint-1")
    (staged / "file").write_text("new")
    os.replace(tmp_path / "checkpoint-1", staged.parent / "replaced-checkpoint-1")  # killed here
    discard_unfinished(tmp_path)
    assert (tmp_path / "checkpoint-1" / "file").read_text() == "old"
    with written_whole(tmp_path / "checkpoint-1") as folder:
        (folder / "file").write_text("new")
    assert (tmp_path / "checkpoint-1" / "file").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]


KILLED = """
import os, signal, sys
sys.path[:0] = {path!r}
from training_runs import build, trainer
made = trainer("bert", build("bert", attention_type="mae"), {folder!r}, max_steps=4,
               save_strategy="steps", save_steps=1)
write, calls = made.{method}, []
def die(*args, **kwargs):
    calls.append(1)
    if len(calls) < 3:
        return write(*args, **kwargs)
    if {after}:
        write(*args, **kwargs)
    os.kill(os.getpid(), signal.SIGKILL)
made.{method} = die
made.train()
"""


@pytest.mark.parametrize(
    ("method", "after"),
    [("_save", True), ("_save_optimizer_and_scheduler", False), ("_save_rng_state", True)],
)
def test_killed_run_goes_on_from_its_last_whole_checkpoint(method, after, tmp_path):
    folder = tmp_path / "killed"
    script = KILLED.format(path=sys.path, folder=str(folder), method=method, after=after)
    died = subprocess.run([sys.executable, "-c", script], capture_output=True, env=os.environ)
    assert died.returncode == -signal.SIGKILL, died.stderr.decode()
    assert get_last_checkpoint(folder) == str(folder / "checkpoint-2")
    assert any((folder / "_unfinished" / "checkpoint-3").iterdir())
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1}
    resumed = trainer("bert", build("bert", attention_type="mae", seed=3), folder, **settings)
    resumed.train(resume_from_checkpoint=True)
    whole = run("bert", build("bert", attention_type="mae"), tmp_path / "whole", **settings)
    assert_same(_tensors(resumed.model), _tensors(whole.model))
    assert not (folder / "_unfinished").exists()


def test_run_killed_between_two_renames_goes_on(tmp_path):
    """The old checkpoint has made way, and the new one has not its name yet."""
    settings = {"save_strategy": "steps", "save_steps": 2}
    run("bert", build("bert"), tmp_path, max_steps=2, **settings)
    staged = stage(tmp_path / "checkpoint-2")
    os.replace(tmp_path / "checkpoint-2", staged.parent / "replaced-checkpoint-2")
    resumed = trainer("bert", build("bert"), tmp_path, max_steps=3, **settings)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 3
    assert (tmp_path / "checkpoint-2").is_dir()
    assert not (tmp_path / "_unfinished").exists()


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_divergence_stops_after_saving(variant, tmp_path):
    model = build("bert", **VARIANTS[variant])
    made = trainer("bert", model, tmp_path, max_steps=4, save_strategy="steps", save_steps=1)

    class Poison(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 2:
                made.before = {k: v.clone() for k, v in _tensors(model).items()}
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
    now = {k: v for k, v in _tensors(model).items() if "noise_scale" not in k}
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
        ({"cct_budgets": [1, 0.5]}, {"cct_noise_steps": None}, "cct_noise_steps must be given"),
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


def test_plain_arguments_are_an_error(tmp_path):
    with pytest.raises(ValueError, match="MoaTrainingArguments"):
        MoaTrainer(model=build("bert"), args=TrainingArguments(str(tmp_path), use_cpu=True))


def test_budget_for_a_model_without_cct_is_an_error(tmp_path):
    made = trainer("bert", build("bert"), tmp_path)
    with pytest.raises(ValueError, match="CCT"):
        evaluate_budgets(made, budgets=[0.5])


# --- what else a `Trainer` does -------------------------------------------------------------------


def test_models_of_transformers_train_too(tmp_path):
    made = run("bert", plain_classifier(), tmp_path, cct_noise_steps=None)
    assert made.state.global_step == 1


def test_model_init_trains_anew(tmp_path):
    """As hyperparameter searches use it, which also change the arguments."""
    arguments = MoaTrainingArguments(
        str(tmp_path), max_steps=1, use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True
    )
    made = MoaTrainer(
        model_init=lambda: build("bert", attention_type="mae"),
        args=arguments,
        train_dataset=list(rows("bert")),
    )
    made.train()
    first = _tensors(made.model)
    made.train()
    assert_same(_tensors(made.model), first)
    made.args.gate_learning_rate = 0.1
    made.train()
    name = next(name for name in first if ".mixture.gate.norm.weight" in name)
    assert not torch.equal(_tensors(made.model)[name], first[name])
    made.args.gate_learning_rate = 0.0
    with pytest.raises(ValueError, match="gate_learning_rate"):
        made.train()


def test_search_goes_on_after_a_trial_that_diverges(tmp_path):
    optuna = pytest.importorskip("optuna")
    arguments = MoaTrainingArguments(
        str(tmp_path), max_steps=2, max_grad_norm=0.0, use_cpu=True, report_to="none",
        save_strategy="no", eval_strategy="steps", eval_steps=2, disable_tqdm=True,
    )  # fmt: skip
    made = MoaTrainer(
        model_init=lambda: build("bert", attention_type="mae"),
        args=arguments,
        train_dataset=list(rows("bert")),
        eval_dataset=list(rows("bert")),
    )
    rates = [1e-4, 1e-3, 1e30]
    best = made.hyperparameter_search(
        hp_space=lambda trial: {"learning_rate": trial.suggest_categorical("learning_rate", rates)},
        sampler=optuna.samplers.GridSampler({"learning_rate": rates}, seed=0),
        n_trials=3,
        backend="optuna",
    )
    assert best.hyperparameters["learning_rate"] < 1
    (diverged,) = tmp_path.glob("run-*/diverged-*/model.safetensors")
    assert diverged.parents[1].name != f"run-{best.run_id}"
    assert not list(tmp_path.glob("diverged-*"))


def test_seq2seq_trainer_generates(tmp_path):
    model = build("t5", attention_type="mae")
    made = trainer("t5", model, tmp_path, trainer_class=MoaSeq2SeqTrainer, predict_with_generate=True)
    made.train()
    prediction = made.predict(made.eval_dataset, max_length=7)
    assert prediction.predictions.shape[0] == 8
    assert (prediction.predictions[:, 7:] == 0).all()
    assert model.mae_phase == "mixture"
