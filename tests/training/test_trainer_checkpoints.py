"""Runs of `MoaTrainer` that stop and go on, bit for bit, and the checkpoints that they leave."""

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
from launching import fresh_python
from training_runs import CLASSES, VARIANTS, assert_same, build, run, tensors, trainer
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from hf_moa.training import written_whole
from hf_moa.training.checkpoints import check_same_model, discard_unfinished, stage


class _StopAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == self.step


@pytest.fixture(scope="module", params=VARIANTS)
def whole(request, tmp_path_factory):
    """A run with a checkpoint at each of its 6 updates: it, its settings, fields and folder."""
    folder = tmp_path_factory.mktemp("whole")
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
    fields = VARIANTS[request.param]
    made = run("bert", build("bert", dropout=True, **fields), folder, **settings)
    assert made.state.global_step == 6
    return made, settings, fields, folder


@pytest.mark.covering
@pytest.mark.parametrize("stop", [1, 2, 4])
def test_resumption_is_bit_exact(stop, whole, tmp_path):
    """In an epoch, and at the ends of one with gate steps and one without.

    Weights, buffers, optimiser, schedule and noise; the data's order too, since they follow."""
    reference, settings, fields, folder = whole
    shutil.copytree(folder / f"checkpoint-{stop}", tmp_path / f"checkpoint-{stop}")
    resumed = trainer("bert", build("bert", dropout=True, seed=7, **fields), tmp_path, **settings)
    torch.rand(5)  # the process has a past of its own
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 6
    assert_same(tensors(resumed.model), tensors(reference.model))
    assert_same(_optimizer_state(resumed), _optimizer_state(reference))
    assert resumed.lr_scheduler.state_dict() == reference.lr_scheduler.state_dict()


def test_stopped_run_goes_on_as_if_it_had_not_stopped(tmp_path):
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1}
    fields = VARIANTS["mae-cct"]
    whole = run("bert", build("bert", dropout=True, **fields), tmp_path / "whole", **settings)
    stopped = trainer("bert", build("bert", dropout=True, **fields), tmp_path / "parts", **settings)
    stopped.add_callback(_StopAt(2))
    stopped.train()
    assert stopped.state.global_step == 2
    model = build("bert", dropout=True, seed=7, **fields)
    resumed = trainer("bert", model, tmp_path / "parts", **settings)
    resumed.train(resume_from_checkpoint=True)
    assert_same(tensors(model), tensors(whole.model))


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
    assert_same(tensors(resumed.model), tensors(whole.model))


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


def _optimizer_state(made):
    state = made.optimizer.state_dict()["state"]
    return {(i, name): value for i, entry in state.items() for name, value in entry.items()}


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


def test_folders_are_written_beside_each_other(tmp_path):
    """As by two runs whose models go to one folder."""
    with written_whole(tmp_path / "seed-1") as one:
        (one / "file").write_text("one")
        with written_whole(tmp_path / "seed-2") as other:
            (other / "file").write_text("other")
    assert (tmp_path / "seed-1" / "file").read_text() == "one"
    assert (tmp_path / "seed-2" / "file").read_text() == "other"
    assert {path.name for path in tmp_path.iterdir()} == {"seed-1", "seed-2"}


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
    [
        pytest.param("_save", True, marks=pytest.mark.slow),
        pytest.param("_save_optimizer_and_scheduler", False, marks=pytest.mark.slow),
        ("_save_rng_state", True),
    ],
)
def test_killed_run_goes_on_from_its_last_whole_checkpoint(method, after, tmp_path):
    folder = tmp_path / "killed"
    script = KILLED.format(path=sys.path, folder=str(folder), method=method, after=after)
    died = fresh_python(script)
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert get_last_checkpoint(folder) == str(folder / "checkpoint-2")
    assert any((folder / "_unfinished" / "checkpoint-3").iterdir())
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1}
    resumed = trainer("bert", build("bert", attention_type="mae", seed=3), folder, **settings)
    resumed.train(resume_from_checkpoint=True)
    whole = run("bert", build("bert", attention_type="mae"), tmp_path / "whole", **settings)
    assert_same(tensors(resumed.model), tensors(whole.model))
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


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({}, {"attention_type": "mae"}, r"has attention_type 'mha', and the model 'mae'\)"),
        (
            {"attention_type": "moa", "num_attention_experts": 6},
            {"attention_type": "moa", "num_attention_experts": 8},
            r"has num_attention_experts 6, and the model 8\)",
        ),
    ],
)
def test_checkpoint_of_another_model_is_not_gone_on_with(first, second, message, tmp_path):
    """It would end at once, with gates that learned nothing."""
    settings = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2}
    run("bert", build("bert", **first), tmp_path, **settings)
    other = trainer("bert", build("bert", **second), tmp_path, **settings)
    before = {name: tensor.clone() for name, tensor in tensors(other.model).items()}
    with pytest.raises(ValueError, match=f"must be a checkpoint of this model .*{message}"):
        other.train(resume_from_checkpoint=True)
    assert_same(tensors(other.model), before)


def test_plain_checkpoint_is_not_gone_on_with_as_a_gated_one(tmp_path):
    plain = CLASSES["bert"].build_plain()
    plain.save_pretrained(tmp_path)
    config = CLASSES["bert"].config(attention_type="mae")
    with pytest.raises(ValueError, match=r"has model_type 'bert', and the model 'moa_bert'"):
        check_same_model(tmp_path, config)
    check_same_model(tmp_path, plain.config)
