"""The Accelerate scripts end to end: tiny models on made-up text, a few updates on the CPU."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import accelerate_training
import pytest
import run_clm_no_trainer
import run_mlm_no_trainer
import run_translation_no_trainer
import torch
import yaml
from accelerate import skip_first_batches, tracking
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.data_loader import prepare_data_loader
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.tracking import GeneralTracker
from accelerate_checkpoints import find_checkpoints
from accelerate_sampling import EpochsGroupedByLength
from datasets import Dataset
from launching import launch
from safetensors.torch import load_file
from script_runs import command_line
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, default_data_collator

from hf_moa.training import TrainingDivergedError

EXAMPLES = Path(run_clm_no_trainer.__file__).parent
SCRIPTS = {
    "clm": run_clm_no_trainer,
    "mlm": run_mlm_no_trainer,
    "translation": run_translation_no_trainer,
}
OVERRIDES = {
    "clm": "n_layer=2,n_embd=32,n_head=4,n_positions=16",
    "mlm": "hidden_size=32,num_hidden_layers=2,num_attention_heads=4,intermediate_size=48",
    "translation": "d_model=32,d_kv=8,num_heads=4,d_ff=48,num_layers=2",
}


@pytest.fixture(autouse=True)
def fresh_accelerator():
    """Accelerate keeps the settings of a process; a script has one of its own."""
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()
    yield
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()


def made_up_lines(count, seed):
    words = ["a", "gate", "chooses", "some", "heads", "and", "skips", "the", "rest", "of", "them"]
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        picked = torch.randint(len(words), (7,), generator=generator).tolist()
        yield " ".join(words[i] for i in picked) + " .\n"


@pytest.fixture
def arguments(tmp_path):
    def make(task, **changes):
        for name, seed in (("train", 0), ("valid", 1)):
            lines = list(made_up_lines(40 if name == "train" else 9, seed))
            (tmp_path / f"{name}.en").write_text("".join(lines))
            (tmp_path / f"{name}.de").write_text("".join(line.upper() for line in lines))
        kinds = {"clm": "moa_gpt2", "mlm": "moa_bert", "translation": "moa_t5"}
        values = {
            "model_type": kinds[task],
            "config_overrides": OVERRIDES[task],
            "vocab_size": 300,
            "output_dir": tmp_path / "out",
            "use_cpu": True,
            "max_train_steps": 4,
            "logging_steps": 1,
            "learning_rate": 1e-2,
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
        }
        if task == "translation":
            values |= {"train_source": tmp_path / "train.en", "train_target": tmp_path / "train.de"}
            values |= {"validation_source": tmp_path / "valid.en", "max_target_length": 12}
            values |= {"validation_target": tmp_path / "valid.de", "num_beams": 2}
        else:
            values |= {"train_file": tmp_path / "train.en", "validation_file": tmp_path / "valid.en"}
        if task == "mlm":
            values |= {"max_seq_length": 16}
        return {**values, **changes}

    return make


def run(task, values):
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()
    return SCRIPTS[task].main(command_line(values))


def weights(values):
    return load_file(Path(values["output_dir"]) / "model.safetensors")


def log(values):
    lines = (Path(values["output_dir"]) / "log.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("task", SCRIPTS)
@pytest.mark.parametrize("attention", ["none", "mae", "moa"])
def test_trains_evaluates_and_saves(task, attention, arguments):
    values = arguments(task, attention_type=attention)
    metrics = run(task, values)
    saved = json.loads((Path(values["output_dir"]) / "all_results.json").read_text())
    assert saved["step"] == 4
    assert saved["eval_loss"] == metrics["eval_loss"] > 0
    assert ("bleu" if task == "translation" else "perplexity") in saved
    entries = log(values)
    assert [entry["step"] for entry in entries] == [1, 2, 3, 4]
    assert all(entry["tokens_per_second"] > 0 for entry in entries)
    if attention == "mae":
        assert any("gate_entropy" in name for name in entries[0])
    if attention == "moa":
        assert any("expert_load_max" in name for name in entries[0])
    AutoTokenizer.from_pretrained(values["output_dir"])


@pytest.mark.parametrize("task", SCRIPTS)
def test_evaluates_at_each_budget(task, arguments):
    values = arguments(task, attention_type="mha", cct_budgets=[1, 0.5], cct_noise_steps=0.5)
    metrics = run(task, values)
    names = {name for name in metrics if name.startswith("eval_loss")}
    expected = {"1_1", "1_0.5", "0.5_1", "0.5_0.5"} if task == "translation" else {"1", "0.5"}
    assert names == {f"eval_loss_at_{budget}" for budget in expected}
    if task == "mlm":
        assert metrics["eval_tokens_at_1"] == metrics["eval_tokens_at_0.5"]


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
    "task", ["clm", *(pytest.param(task, marks=pytest.mark.slow) for task in ("mlm", "translation"))]
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


NO_DROPOUT = {
    "clm": "resid_pdrop=0,embd_pdrop=0,attn_pdrop=0",
    "mlm": "hidden_dropout_prob=0,attention_probs_dropout_prob=0",
    "translation": "dropout_rate=0",
}


def test_accumulation_changes_no_gradient(arguments, monkeypatch, tmp_path):
    """Padded rows of a translation model, the routers' z-loss included."""
    monkeypatch.setattr(torch.optim, "AdamW", lambda groups, lr, betas: torch.optim.SGD(groups, lr=lr))
    shared = {
        "attention_type": "moa",
        "config_overrides": f"{OVERRIDES['translation']},{NO_DROPOUT['translation']},"
        "router_z_loss_coef=1,router_balance_loss_coef=0",
        "learning_rate": 1.0,
        "max_grad_norm": 0,
        "max_train_steps": 1,
        "label_smoothing_factor": 0.1,
    }
    updated = []
    for batch, accumulation in ((8, 1), (2, 4)):
        sizes = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}
        values = arguments("translation", **shared | sizes, output_dir=tmp_path / f"{batch}")
        run("translation", values)
        updated.append(weights(values))
    for name, tensor in updated[0].items():
        torch.testing.assert_close(updated[1][name], tensor, atol=1e-5, rtol=1e-4, msg=name)


def mean_padding(order, lengths, rows):
    batches = [[lengths[i] for i in order[start : start + rows]] for start in range(0, len(order), rows)]
    return sum(max(batch) * len(batch) - sum(batch) for batch in batches) / len(order)


def test_rows_grouped_by_length_are_in_an_order_of_seed_and_epoch():
    lengths = torch.randint(1, 50, (400,), generator=torch.Generator().manual_seed(0)).tolist()
    sampler = EpochsGroupedByLength(lengths, 16, seed=1)
    first = list(sampler)
    torch.rand(3)
    assert list(sampler) == first
    sampler.set_epoch(1)
    second = list(sampler)
    assert second != first
    assert sorted(first) == sorted(second) == list(range(400))
    assert list(EpochsGroupedByLength(lengths, 16, seed=2)) == second  # as Accelerate's random order
    assert mean_padding(first, lengths, 8) < 0.3 * mean_padding(range(400), lengths, 8)


def test_processes_share_the_order_of_rows_grouped_by_length():
    """And one that is resumed in the middle of an epoch."""
    rows = list(range(40))

    def batches(process_index=0, num_processes=1, skipped=0):
        sampler = EpochsGroupedByLength([row % 7 for row in rows], 8, seed=0)
        loader = DataLoader(rows, batch_size=8 // num_processes, sampler=sampler)
        loader = prepare_data_loader(loader, None, num_processes, process_index)
        loader.set_epoch(3)
        loader = skip_first_batches(loader, skipped) if skipped else loader
        return [batch.tolist() for batch in loader]

    parts = zip(batches(0, 2), batches(1, 2), strict=True)
    assert [first + second for first, second in parts] == batches()
    assert batches(skipped=2) == batches()[2:]
    assert batches(1, 2, skipped=2) == batches(1, 2)[2:]


def test_batches_of_similar_length_resume_bit_for_bit(arguments, tmp_path):
    whole = arguments("translation", per_device_train_batch_size=8, gradient_accumulation_steps=1)
    whole |= {"train_sampling_strategy": "group_by_length", "checkpointing_steps": 3}
    whole |= {"max_train_steps": 6, "validation_source": None, "validation_target": None}
    run("translation", whole)
    parts = whole | {"output_dir": tmp_path / "parts", "resume_from_checkpoint": "latest"}
    shutil.copytree(tmp_path / "out" / "step_3", tmp_path / "parts" / "step_3")
    run("translation", parts)
    for name, tensor in weights(whole).items():
        assert torch.equal(weights(parts)[name], tensor), name
    random = whole | {"output_dir": tmp_path / "random", "train_sampling_strategy": "random"}
    run("translation", random | {"max_train_steps": 1})
    assert log(random)[0]["loss"] != log(whole)[0]["loss"]


@pytest.mark.slow
@pytest.mark.parametrize("task", SCRIPTS)
def test_two_processes_train_as_one(task, arguments, tmp_path):
    """2 x 4 rows as 1 x 8, evaluation included; nothing is drawn but the order of the data."""
    shared = {
        "attention_type": "mae",
        "mae_training": "joint",
        "mae_gate_dropout": 0,
        "config_overrides": f"{OVERRIDES[task]},{NO_DROPOUT[task]}",
        "learning_rate": 1e-3,
        "checkpointing_steps": 4,
    }
    one = arguments(task, **shared, per_device_train_batch_size=8)
    run(task, one)
    two = arguments(task, **shared, output_dir=tmp_path / "two")
    launch(SCRIPTS[task].__file__, *command_line(two))
    expected, actual = weights(one), weights(two)
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, atol=2e-4, rtol=1e-3, msg=name)
    for key, value in json.loads((tmp_path / "out" / "all_results.json").read_text()).items():
        if key == "rows_per_update":
            continue
        other = json.loads((tmp_path / "two" / "all_results.json").read_text())[key]
        assert other == pytest.approx(value, rel=1e-3, abs=0.5 if key == "bleu" else 0), key
    folders = find_checkpoints(tmp_path / "two")
    assert [folder.name for folder in folders] == ["step_4"]


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
    died = subprocess.run([sys.executable, "-c", script], capture_output=True, env=os.environ)
    assert died.returncode == -signal.SIGKILL, died.stderr.decode()
    whole = [path.name for path in find_checkpoints(tmp_path / "out")]
    assert whole == ["step_1", "step_2"]
    run("clm", values)
    other = arguments("clm", attention_type="mae", output_dir=tmp_path / "undisturbed")
    run("clm", other)
    expected = weights(other)
    for name, tensor in weights(values).items():
        assert torch.equal(tensor, expected[name]), name


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
            r"must be those of the run to resume, \(4, 2, 1\) .got \(2, 2, 1\)",
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


class Recorder(GeneralTracker):
    """A tracker that keeps what it is given."""

    name, requires_logging_directory = "recorder", False
    started, values, finished = [], [], []

    def __init__(self, run_name, **kwargs):
        super().__init__()
        for kept in (self.started, self.values, self.finished):
            kept.clear()

    @property
    def tracker(self):
        return self

    def store_init_configuration(self, values):
        self.started.append(values)

    def log(self, values, step=None, **kwargs):
        self.values.append((step, values))

    def finish(self):
        self.finished.append(True)


def test_tracker_receives_logs_and_metrics_but_no_secret(arguments, monkeypatch):
    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "recorder", Recorder)
    values = arguments("clm", attention_type="mae", with_tracking=True, report_to="recorder",
                       eval_steps=2, hub_token="secret")  # fmt: skip
    metrics = run("clm", values)
    (started,) = Recorder.started
    assert started["learning_rate"] == 1e-2
    assert "secret" not in map(str, started.values())
    logged = [(step, row) for step, row in Recorder.values if "loss" in row]
    assert [{"step": step, **row} for step, row in logged] == log(values)
    evaluated = [(step, row) for step, row in Recorder.values if "perplexity" in row]
    assert [step for step, _ in evaluated] == [2, 4, 4]  # and in the end
    assert evaluated[-1][1] == metrics
    assert Recorder.finished == [True]


def test_infinite_loss_stops_a_run_with_a_scaler(arguments, monkeypatch):
    """Which skips the updates of infinite gradients, and would go on for ever."""
    backward = accelerate_training.GatedTraining._backward

    def poisoned(self, *args):
        self.accelerator.scaler = SimpleNamespace(scale=lambda loss: loss)
        outputs, loss = backward(self, *args)
        for p in self.gated.parameters():
            p.grad = p.grad * float("nan")
        return outputs, loss * float("nan")

    monkeypatch.setattr(accelerate_training.GatedTraining, "_backward", poisoned)
    monkeypatch.setattr(accelerate_training.Accelerator, "unscale_gradients", lambda self: None)
    with pytest.raises(TrainingDivergedError, match="The loss is infinite"):
        run("clm", arguments("clm"))


def test_checkpoints_are_averaged(arguments):
    values = arguments("translation", attention_type="mae", checkpointing_steps=1)
    values |= {"average_checkpoints": 3, "checkpoints_total_limit": 1}
    run("translation", values)
    folders = find_checkpoints(Path(values["output_dir"]))
    assert [folder.name for folder in folders] == ["step_2", "step_3", "step_4"]
    states = [load_file(folder / "model.safetensors") for folder in folders]
    for name, tensor in weights(values).items():
        if tensor.is_floating_point():
            mean = sum(state[name].double() for state in states) / 3
            torch.testing.assert_close(tensor.double(), mean, atol=1e-7, rtol=1e-6)


def test_starts_from_a_checkpoint(arguments, tmp_path):
    first = arguments("clm", model_type="gpt2", max_train_steps=1)
    run("clm", first)
    changes = {"model_type": None, "config_overrides": None, "vocab_size": None}
    second = arguments("clm", **changes, model_name_or_path=tmp_path / "out", attention_type="moa")
    second["output_dir"] = tmp_path / "second"
    run("clm", second)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "second").config.attention_type == "moa"


def test_masks_follow_from_seed_epoch_and_place(arguments):
    values = arguments("mlm")
    run("mlm", values)
    tokenizer = AutoTokenizer.from_pretrained(values["output_dir"])
    lines = list(made_up_lines(400, 0))
    settings = {"length": 16, "probability": 0.3, "seed": 1}
    one = run_mlm_no_trainer.RemaskedSequences(lines, tokenizer, **settings)
    other = run_mlm_no_trainer.RemaskedSequences(lines, tokenizer, **settings)
    rows = [one[i] for i in range(len(one))]
    for i in reversed(range(len(one))):
        assert torch.equal(rows[i]["input_ids"], other[i]["input_ids"])
    one.set_epoch(1)
    assert any(not torch.equal(one[i]["input_ids"], rows[i]["input_ids"]) for i in range(len(one)))
    ids = torch.stack([row["input_ids"] for row in rows])
    labels = torch.stack([row["labels"] for row in rows])
    predicted = labels != -100
    assert not predicted[:, 0].any()  # [CLS]
    assert 0.2 < predicted.float().mean() < 0.33
    masked = (ids == tokenizer.mask_token_id)[predicted].float().mean()
    assert 0.75 < masked < 0.85
    assert 0.07 < (ids == labels)[predicted].float().mean() < 0.14
    assert torch.equal(torch.where(predicted, labels, ids), one.ids)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"checkpointing_steps": "often"}, "`checkpointing_steps` must be .*'often'"),
        ({"average_checkpoints": 2}, "`average_checkpoints` needs `checkpointing_steps`"),
        (
            {"average_checkpoints": 3, "checkpointing_steps": 2},
            "`average_checkpoints` must be at most 2",
        ),
        (
            {"train_sampling_strategy": "sorted"},
            "`train_sampling_strategy` must be random or group_by_length .*'sorted'",
        ),
        (
            {"train_sampling_strategy": "group_by_length"},
            "`train_sampling_strategy` group_by_length needs rows of several lengths",
        ),
        ({"eval_steps": 0}, "`eval_steps` must be at least 1"),
        ({"max_train_steps": 0}, "`max_train_steps` must be at least 1"),
        ({"push_to_hub": True}, "`push_to_hub` needs `hub_model_id`"),
        ({"eval_budgets": True}, "`eval_budgets` needs a model with CCT"),
        ({"mae_training": "bcd"}, "mae_training='bcd' needs a model with MAE"),
        ({"attention_type": "mha", "cct_budgets": [1, 0.5]}, "cct_noise_steps must be given"),
        ({"cct_noise_steps": 5}, "cct_noise_steps needs a model with CCT"),
        ({"resume_from_checkpoint": "nowhere"}, "`resume_from_checkpoint` must be .*nowhere"),
        ({"gradient_accumulation_steps": 0}, "`gradient_accumulation_steps` must be at least 1"),
        ({"train_file": None}, "train text is needed"),
    ],
)
def test_arguments_that_cannot_work_are_errors(changes, message, arguments):
    with pytest.raises(ValueError, match=message):
        run("clm", arguments("clm", **changes))


def test_divergence_stops_after_saving(arguments, tmp_path):
    values = arguments("clm", attention_type="mae", learning_rate=1e30, max_grad_norm=0)
    with pytest.raises(TrainingDivergedError, match=r"step .*Last losses: loss .*learning_rate"):
        run("clm", values)
    assert list((tmp_path / "out").glob("diverged-*/model.safetensors"))


def test_loss_that_is_not_finite_stops_a_run_whatever_its_gradients(arguments, monkeypatch):
    backward = accelerate_training.GatedTraining._backward

    def poisoned(self, *args):
        outputs, loss = backward(self, *args)
        return outputs, loss * float("nan")

    monkeypatch.setattr(accelerate_training.GatedTraining, "_backward", poisoned)
    with pytest.raises(TrainingDivergedError, match="The loss is infinite or no number"):
        run("clm", arguments("clm"))


def test_divergence_in_the_first_gate_step_names_its_losses(arguments, monkeypatch, tmp_path):
    load_model = run_clm_no_trainer.load_model

    def poisoned(*args, **kwargs):
        model = load_model(*args, **kwargs)
        gate = next(p for name, p in model.named_parameters() if ".mixture.gate." in name)
        gate.register_hook(lambda gradient: gradient * float("nan"))
        return model

    monkeypatch.setattr(run_clm_no_trainer, "load_model", poisoned)
    with pytest.raises(TrainingDivergedError, match=r"gates' gradients.*Last losses: loss \d+\.\d+\. "):
        run("clm", arguments("clm", attention_type="mae"))


def test_update_without_labels_is_told_apart(arguments, monkeypatch):
    monkeypatch.setattr(
        run_clm_no_trainer,
        "default_data_collator",
        lambda rows: (
            (batch := default_data_collator(rows)) | {"labels": torch.full_like(batch["labels"], -100)}
        ),
    )
    with pytest.raises(TrainingDivergedError, match="no label to learn from"):
        run("clm", arguments("clm"))


# What `accelerate launch` makes of each file.
LAUNCHES = {
    "cpu": {"use_cpu": True, "num_processes": 1, "mixed_precision": "no"},
    "one_gpu": {"use_cpu": False, "multi_gpu": False, "num_processes": 1, "mixed_precision": "bf16"},
    "ddp": {"multi_gpu": True, "num_processes": 2, "mixed_precision": "bf16"},
    "fsdp2": {
        "use_fsdp": True,
        "fsdp_version": 2,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_transformer_layer_cls_to_wrap": "MoaGPT2Block",
        "fsdp_cpu_ram_efficient_loading": False,
        "mixed_precision": "bf16",
    },
    "deepspeed_zero3": {
        "use_deepspeed": True,
        "zero_stage": 3,
        "gradient_clipping": 1.0,
        "mixed_precision": "bf16",
    },
}
LAUNCH_KINDS = ("multi_gpu", "use_fsdp", "use_deepspeed")


@pytest.mark.parametrize("path", sorted((EXAMPLES / "accelerate").glob("*.yaml")), ids=lambda p: p.stem)
def test_configurations_are_accelerates(path, monkeypatch):
    assert yaml.safe_load(path.read_text())
    ClusterConfig.from_yaml_file(str(path))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    command = launch_command_parser().parse_args(["--config_file", str(path), "script.py"])
    found = vars(_validate_launch_command(command)[0])
    expected = dict.fromkeys(LAUNCH_KINDS, False) | LAUNCHES[path.stem]
    assert {name: found[name] for name in expected} == expected


@pytest.mark.slow
def test_cpu_configuration_runs_a_script(arguments):
    values = arguments("clm", attention_type="mae", max_train_steps=2, use_cpu=None)
    configuration = EXAMPLES / "accelerate" / "cpu.yaml"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(configuration),
               run_clm_no_trainer.__file__, *command_line(values)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert [entry["step"] for entry in log(values)] == [1, 2]


@pytest.fixture
def translation_dataset(arguments, tmp_path):
    """Arguments of a run on files, and of the same pairs as a data set of the Hub has them."""
    values = arguments("translation")
    (tmp_path / "data").mkdir()
    files = {"train": "train", "validation": "valid"}
    for split, name in files.items():
        sides = [(tmp_path / f"{name}.{side}").read_text().splitlines() for side in ("en", "de")]
        rows = [{"en": en, "de": de} for en, de in zip(*sides, strict=True)]
        Dataset.from_dict({"translation": rows}).to_parquet(tmp_path / "data" / f"{split}.parquet")
    changes = {f"{split}_{side}": None for split in files for side in ("source", "target")}
    changes |= {"dataset_name": tmp_path / "data", "cache_dir": tmp_path / "cache"}
    return values, changes | {"source_lang": "en", "target_lang": "de"}


def test_translation_of_a_data_set_is_that_of_its_files(translation_dataset, tmp_path):
    values, changes = translation_dataset
    run("translation", values)
    expected = weights(values)
    values |= changes | {"output_dir": tmp_path / "again"}
    run("translation", values)
    assert all(torch.equal(weights(values)[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source_lang": None}, r"needs `source_lang` and `target_lang` \(got None and 'de'\)"),
        ({"target_lang": "fr"}, r"`target_lang` must be a language .*'fr'; there are (en, de|de, en)"),
        ({"train_source": "train.en"}, "either `dataset_name` or files"),
    ],
)
def test_data_sets_that_cannot_be_translated_are_refused(translation_dataset, change, message):
    values, changes = translation_dataset
    with pytest.raises(ValueError, match=message):
        run("translation", values | changes | change)
