"""Runs of the Accelerate scripts that stop and go on, as if they had not stopped."""

import json
import os
import shutil
import signal
import sys
import time

import pytest
import torch
from accelerate_runs import NO_DROPOUT, OVERRIDES, SCRIPTS, cut_unevenly, evaluations, log, run, weights
from launching import ON_CPU, fresh_python, launch_ranks, torchrun
from script_runs import command_line

from hf_moa.recipes.accelerate.checkpoints import find_checkpoints


@pytest.mark.covering
@pytest.mark.parametrize("task", SCRIPTS)
@pytest.mark.parametrize("step", [2, 3])
def test_resumes_bit_for_bit(task, step, arguments, tmp_path):
    """In the middle of an epoch and of a block coordinate descent."""
    shared = {
        "attention_type": "mae",
        "gate_every_n_epochs": 2,
        "max_train_steps": 6,
        "checkpointing_steps": 1,
        "gradient_accumulation_steps": 1,
        "per_device_train_batch_size": 8,
        "resume_from_checkpoint": "latest",
    }
    if task == "translation":
        shared["cct_budgets"], shared["cct_noise_steps"] = [1, 0.5], -1
        shared["predict_with_generate"] = False
        shared["optim"] = "adafactor"
    whole = arguments(task, **shared)
    run(task, whole)
    parts = arguments(task, **shared, output_dir=tmp_path / "parts")
    (tmp_path / "parts").mkdir()
    os.rename(tmp_path / "out" / f"step_{step}", tmp_path / "parts" / f"step_{step}")
    run(task, parts)
    expected = weights(whole)
    for name, tensor in weights(parts).items():
        assert torch.equal(tensor, expected[name]), name
    assert [entry["step"] for entry in log(parts)] == list(range(step + 1, 7))
    assert log(parts)[-1]["loss"] == log(whole)[-1]["loss"]


@pytest.mark.parametrize(
    "task", ["clm", *(pytest.param(task, marks=pytest.mark.nightly) for task in ("mlm", "translation"))]
)
def test_resumes_bit_for_bit_in_later_epochs(task, arguments, tmp_path):
    """At their ends, where an evaluation follows the checkpoint, and between them."""
    shared = {
        "attention_type": "mae",
        "gate_every_n_epochs": 2,
        "num_train_epochs": 3,
        "max_train_steps": None,
        "gradient_accumulation_steps": 1,
        "per_device_train_batch_size": 8,
        "resume_from_checkpoint": "latest",
    }
    for every in ("epoch", 1):
        whole = arguments(task, **shared, checkpointing_steps=every, output_dir=tmp_path / f"{every}")
        run(task, whole)
        expected = weights(whole)
        folders = find_checkpoints(tmp_path / f"{every}")
        stops = folders[:2] if every == "epoch" else folders[len(folders) // 3 : len(folders) // 3 + 1]
        for folder in stops:
            parts = whole | {"output_dir": tmp_path / f"after-{folder.name}"}
            shutil.copytree(folder, parts["output_dir"] / folder.name)
            run(task, parts)
            for name, tensor in weights(parts).items():
                assert torch.equal(tensor, expected[name]), (folder.name, name)


@pytest.mark.parametrize(
    ("task", "changes"),
    [
        ("translation", {"validation_source": None, "validation_target": None}),
        ("mlm", {"line_by_line": True, "validation_file": None, "validation_split_percentage": 0}),
    ],
)
def test_batches_of_similar_length_resume_bit_for_bit(task, changes, arguments, tmp_path):
    whole = arguments(task, **changes, max_train_steps=6, checkpointing_steps=3)
    whole["train_sampling_strategy"] = "group_by_length"
    if task == "mlm":
        cut_unevenly(whole["train_file"])
    run(task, whole)
    parts = whole | {"output_dir": tmp_path / "parts", "resume_from_checkpoint": "latest"}
    shutil.copytree(tmp_path / "out" / "step_3", tmp_path / "parts" / "step_3")
    run(task, parts)
    for name, tensor in weights(whole).items():
        assert torch.equal(weights(parts)[name], tensor), name
    random = whole | {"output_dir": tmp_path / "random", "train_sampling_strategy": "random"}
    run(task, random | {"max_train_steps": 1})
    assert log(random)[0]["loss"] != log(whole)[0]["loss"]


@pytest.mark.parametrize(("batch", "accumulated"), [(8, 1), (2, 4)])
def test_resumes_with_updates_of_other_batches(batch, accumulated, arguments, tmp_path):
    """Of as many sequences in all: the run sees the same ones, also after the end of an epoch."""
    shared = {"config_overrides": f"{OVERRIDES['clm']},{NO_DROPOUT['clm']}", "attention_type": "mha"}
    whole = arguments("clm", **shared, learning_rate=1e-3, checkpointing_steps=1, max_train_steps=8)
    run("clm", whole)
    assert log(whole)[-1]["epoch"] > 0
    for step in (1, 6):
        parts = whole | {"output_dir": tmp_path / f"parts-{step}", "resume_from_checkpoint": "latest"}
        parts |= {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulated}
        shutil.copytree(tmp_path / "out" / f"step_{step}", parts["output_dir"] / f"step_{step}")
        run("clm", parts)
        assert [entry["step"] for entry in log(parts)] == list(range(step + 1, 9))
        torch.testing.assert_close(weights(parts), weights(whole), atol=2e-4, rtol=1e-3)


def test_killed_run_goes_on_from_its_last_whole_checkpoint(arguments, tmp_path):
    values = arguments("clm", attention_type="mae", checkpointing_steps=1)
    values["resume_from_checkpoint"] = "latest"
    script = f"""
import os, signal, sys
sys.path[:0] = {sys.path!r}
import accelerate
save, calls = accelerate.Accelerator.save_state, []
def die(*args, **kwargs):
    save(*args, **kwargs)
    calls.append(1)
    if len(calls) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
accelerate.Accelerator.save_state = die
import run_clm_no_trainer
run_clm_no_trainer.main({command_line(values)!r})
"""
    died = fresh_python(script)
    assert died.returncode == -signal.SIGKILL, died.stderr
    whole = [path.name for path in find_checkpoints(tmp_path / "out")]
    assert whole == ["step_1", "step_2"]
    run("clm", values)
    other = arguments("clm", attention_type="mae", output_dir=tmp_path / "undisturbed")
    run("clm", other)
    expected = weights(other)
    for name, tensor in weights(values).items():
        assert torch.equal(tensor, expected[name]), name


_DIES = """
import os, signal, sys, time
from pathlib import Path
import accelerate
import run_clm_no_trainer
save, calls = accelerate.Accelerator.save_state, []
def die(*args, **kwargs):
    calls.append(1)
    if len(calls) == 3 and os.environ["RANK"] == "2":
        Path(sys.argv[1]).write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    save(*args, **kwargs)
if sys.argv[1] != "nobody":
    accelerate.Accelerator.save_state = die
run_clm_no_trainer.main(sys.argv[2:])
"""


@pytest.mark.slow
def test_one_of_four_processes_is_killed(arguments, tmp_path):
    """The others end within a minute, with an error that says so, and the run goes on."""
    (tmp_path / "script.py").write_text(_DIES)
    values = arguments("clm", attention_type="mae", checkpointing_steps=1, per_device_train_batch_size=1)
    values["resume_from_checkpoint"] = "latest"
    script = tmp_path / "script.py"
    died = torchrun(4, script, tmp_path / "time_of_death", *command_line(values))
    assert died.returncode != 0
    assert time.time() - float((tmp_path / "time_of_death").read_text()) < 60
    assert "Signal 9 (SIGKILL)" in died.stderr
    assert [path.name for path in find_checkpoints(tmp_path / "out")] == ["step_1", "step_2"]
    changed = values | {"output_dir": tmp_path / "undisturbed"}
    for each in (values, changed):
        launch_ranks(4, script, "nobody", *command_line(each), environment=ON_CPU)
    # DDP does not add four terms in the order of a run without a stop
    torch.testing.assert_close(weights(values), weights(changed), rtol=1e-5, atol=1e-6)


def test_an_evaluation_stands_in_the_log_once(arguments, tmp_path):
    """Also at the end of an epoch, in whose last update a run has been stopped."""
    values = arguments("clm", checkpointing_steps=1, num_train_epochs=3, max_train_steps=None)
    run("clm", values)
    expected = evaluations(values)
    first, second = (entry["step"] for entry in expected)
    for step in (first, first + 1, second):
        parts = values | {"output_dir": tmp_path / f"after-{step}"}
        shutil.copytree(tmp_path / "out" / f"step_{step}", parts["output_dir"] / f"step_{step}")
        shutil.copy(tmp_path / "out" / "log.jsonl", parts["output_dir"])
        run("clm", parts | {"resume_from_checkpoint": "latest"})
        assert evaluations(parts) == expected


def test_residues_of_a_kill_do_not_stop_the_resumed_run(arguments, tmp_path):
    """Between the renames of a replaced checkpoint, and in the middle of a line of the log."""
    values = arguments("clm", checkpointing_steps=2)
    run("clm", values)
    out = tmp_path / "out"
    shutil.rmtree(out / "step_4")
    (out / "_unfinished").mkdir()
    os.rename(out / "step_2", out / "_unfinished" / "replaced-step_2")
    (out / "log.jsonl").write_text((out / "log.jsonl").read_text()[:-20])
    run("clm", values | {"resume_from_checkpoint": "latest"})
    assert [entry["step"] for entry in log(values)] == [1, 2, 3, 4]
    assert {path.name for path in out.glob("*_*")} >= {"step_2", "step_4"}
    assert not (out / "_unfinished").exists()


def test_a_checkpoint_before_others_is_refused(arguments, tmp_path):
    """Those of the abandoned run would be kept, and averaged with the new one's."""
    values = arguments("clm", checkpointing_steps=1)
    run("clm", values)
    values["resume_from_checkpoint"] = tmp_path / "out" / "step_2"
    with pytest.raises(ValueError, match=r"not the last checkpoint .*\(got later ones, step_3, step_4"):
        run("clm", values)
    run("clm", values | {"output_dir": tmp_path / "other"})
    assert [path.name for path in find_checkpoints(tmp_path / "other")] == ["step_3", "step_4"]


def test_last_metrics_are_those_of_the_saved_model(arguments, tmp_path):
    """Whatever was evaluated on the way; and of a finished run that is started again."""
    values = arguments("clm", attention_type="mae", eval_steps=3, checkpointing_steps=2)
    first = run("clm", values)
    again = run("clm", values | {"resume_from_checkpoint": "latest"})
    assert again == first
    saved = json.loads((tmp_path / "out" / "all_results.json").read_text())
    assert saved["eval_loss"] == first["eval_loss"]
    assert [entry["step"] for entry in log(values)] == [1, 2, 3, 4]


def test_run_that_ended_in_an_epoch_can_go_on(arguments, tmp_path):
    """40 lines in batches of 8 rows make epochs of several updates; 2 end in the first."""
    shared = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "learning_rate": 1e-3,
              "lr_scheduler_type": "constant", "checkpointing_steps": 1}  # fmt: skip
    whole = arguments("clm", **shared, max_train_steps=5)
    run("clm", whole)
    parts = arguments("clm", **shared, max_train_steps=2, output_dir=tmp_path / "parts")
    run("clm", parts)
    saved = json.loads((tmp_path / "parts" / "all_results.json").read_text())
    assert (saved["epoch"], saved["batches_in_epoch"]) == (0, 2)
    run("clm", parts | {"max_train_steps": 5, "resume_from_checkpoint": "latest"})
    expected = weights(whole)
    for name, tensor in weights(parts).items():
        assert torch.equal(tensor, expected[name]), name


def test_resumed_run_keeps_its_tokenizer(arguments, tmp_path):
    values = arguments("clm", checkpointing_steps=2)
    run("clm", values)
    before = (tmp_path / "out" / "tokenizer.json").read_text()
    (tmp_path / "train.en").write_text("other words entirely ?! " * 200)
    os.rename(tmp_path / "out" / "step_4", tmp_path / "gone")
    changes = {"train_file": tmp_path / "train.en", "resume_from_checkpoint": "latest"}
    run("clm", values | changes)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "`output_dir` .*holds checkpoints of another run"),
        (
            {"resume_from_checkpoint": "latest", "per_device_train_batch_size": 2},
            r"as many sequences as an update of the run to resume, 4 x 2 x 1 .got 2 x 2 x 1",
        ),
        (
            {"resume_from_checkpoint": "latest", "seed": 7},
            r"`seed` must be that of the run to resume, 42 .got 7",
        ),
        (
            {"resume_from_checkpoint": "latest", "train_sampling_strategy": "group_by_length"},
            r"`train_sampling_strategy` must be that of the run to resume, random .got group_by_length",
        ),
    ],
)
def test_another_runs_folder_is_refused(changes, message, arguments):
    values = arguments("translation", checkpointing_steps=2, max_train_steps=2)
    run("translation", values)
    with pytest.raises(ValueError, match=message):
        run("translation", values | changes)
