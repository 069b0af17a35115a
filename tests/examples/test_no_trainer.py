"""The Accelerate scripts end to end: tiny models on made-up text, a few updates on the CPU."""

import json
import re
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import DistributedType, tracking
from accelerate.tracking import GeneralTracker
from accelerate_runs import NO_DROPOUT, OVERRIDES, SCRIPTS, cut_unevenly, evaluations, log, run, weights
from launching import ON_CPU, launch_ranks
from safetensors.torch import load_file
from script_runs import command_line
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_moa.markdown import cell, split_sections
from hf_moa.model_card import checkpoint_card, read_card
from hf_moa.recipes.accelerate import AccelerateArguments
from hf_moa.recipes.accelerate import arguments as accelerate_arguments
from hf_moa.recipes.accelerate.checkpoints import find_checkpoints
from hf_moa.recipes.accelerate.optimizers import make_optimizer
from hf_moa.recipes.gating import GatingArguments
from hf_moa.recipes.masked_text import MaskedTextArguments
from hf_moa.recipes.models import ModelArguments
from hf_moa.run_results import budget_table
from hf_moa.training.adafactor import SMALLEST_SIZE


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


@pytest.mark.parametrize(
    ("task", "budgets"), [*((task, ["1", "0.5"]) for task in SCRIPTS), ("translation", ["1,1", "1,0.5"])]
)
def test_evaluates_at_each_budget(task, budgets, arguments):
    values = arguments(task, attention_type="mha", cct_budgets=budgets, cct_noise_steps=0.5)
    metrics = run(task, values)
    names = {name for name in metrics if name.startswith("eval_loss")}
    assert names == {f"eval_loss_at_{budget.replace(',', '_')}" for budget in budgets}
    if task == "mlm":
        assert metrics["eval_tokens_at_1"] == metrics["eval_tokens_at_0.5"]


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


@pytest.mark.parametrize("smoothing", [0, 0.1])
@pytest.mark.parametrize(
    ("task", "kind"), [("mlm", "bert"), ("translation", "t5"), ("clm", "gpt2"), ("clm", "moa_gpt2")]
)
def test_accumulation_changes_no_loss_of_plain_models(task, kind, smoothing, arguments, tmp_path):
    """Their losses are means over a micro-batch; rows here have not as many labels."""
    shared = {
        "model_type": kind,
        "config_overrides": f"{OVERRIDES[task]},{NO_DROPOUT[task]}",
        "label_smoothing_factor": smoothing,
        "max_train_steps": 2,
    }
    shared |= {"line_by_line": True} if task == "mlm" else {}
    losses = []
    for batch, accumulation in ((8, 1), (2, 4)):
        sizes = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}
        values = arguments(task, **shared | sizes, output_dir=tmp_path / f"{batch}")
        run(task, values)
        losses.append([entry["loss"] for entry in log(values)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.parametrize("smoothing", [0, 0.1])
def test_sparse_prediction_changes_no_loss(smoothing, arguments, tmp_path):
    losses = []
    for sparse in (False, True):
        overrides = f"{OVERRIDES['mlm']},sparse_prediction={sparse}"
        shared = {"attention_type": "mae", "label_smoothing_factor": smoothing}
        values = arguments(
            "mlm", **shared, config_overrides=overrides, output_dir=tmp_path / f"{sparse}"
        )
        evaluated = run("mlm", values)["eval_loss"]
        losses.append([*(entry["loss"] for entry in log(values)), evaluated])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_smoothed_loss_of_a_plain_gpt2_is_a_gated_ones(arguments, tmp_path):
    losses = []
    for kind in ("gpt2", "moa_gpt2"):
        values = arguments("clm", model_type=kind, label_smoothing_factor=0.1, max_train_steps=1,
                           config_overrides=f"{OVERRIDES['clm']},{NO_DROPOUT['clm']}",
                           output_dir=tmp_path / kind)  # fmt: skip
        run("clm", values)
        losses.append(log(values)[0]["loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_weight_decay_leaves_biases_of_experts_alone(arguments, caught):
    fields = {"attention_type": "moa", "ffn_type": "moe", "weight_decay": 0.1}
    run("mlm", arguments("mlm", **fields))
    (training,) = caught
    decayed, others = training.optimizer.param_groups
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    names = {id(parameter): name for name, parameter in training.gated.named_parameters()}
    left = [names[id(parameter)] for parameter in others["params"]]
    assert all(name.endswith("bias") or "norm" in name.lower() for name in left)
    assert not any(names[id(parameter)].endswith("bias") for parameter in decayed["params"])


def test_adafactor_steps_are_relative_to_each_weight(arguments, caught):
    """Also those of gates that start at zero, as a converted checkpoint's do."""
    values = arguments("translation", attention_type="mae", mae_training="joint", optim="adafactor")
    run("translation", values | {"learning_rate": 0.1})
    (training,) = caught
    for name, p in training.gated.named_parameters():
        if name.endswith("gate.out.weight"):
            torch.nn.init.zeros_(p)
    weights = [p for p in training.gated.parameters() if p.ndim == 2]
    before = [p.detach().clone() for p in weights]
    for p in weights:
        p.grad = torch.randn_like(p)
    training.optimizer.step()
    sizes = torch.stack([p.square().mean().sqrt() for p in before])
    moves = [p.detach() - old for p, old in zip(weights, before, strict=True)]
    moved = torch.stack([move.square().mean().sqrt() for move in moves])
    assert sizes.max() > 0.9
    assert sizes.min() < 1e-6
    torch.testing.assert_close(moved, 0.1 * sizes.clamp(min=SMALLEST_SIZE), rtol=0.1, atol=0)


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED"])
def test_adafactor_needs_whole_weights(kind):
    args = AccelerateArguments(output_dir="out", optim="adafactor")
    accelerator = SimpleNamespace(distributed_type=DistributedType[kind])
    with pytest.raises(ValueError, match=f"`optim` adafactor takes .* under {kind}"):
        make_optimizer(args, torch.nn.Linear(2, 2), accelerator, gates=True)


GROUPED_LINES = {"line_by_line": True, "train_sampling_strategy": "group_by_length"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "changes"),
    [
        pytest.param("clm", {}, marks=pytest.mark.nightly),
        ("mlm", GROUPED_LINES),
        pytest.param("translation", {}, marks=pytest.mark.nightly),
    ],
    ids=["clm", "mlm of grouped lines", "translation"],
)
def test_two_processes_train_as_one(task, changes, arguments, tmp_path):
    """2 x 4 rows as 1 x 8, evaluation included; nothing is drawn but the order of the data."""
    shared = {
        "attention_type": "mae",
        "mae_training": "joint",
        "mae_gate_dropout": 0,
        "config_overrides": f"{OVERRIDES[task]},{NO_DROPOUT[task]}",
        "learning_rate": 1e-3,
        "checkpointing_steps": 4,
    }
    one = arguments(task, **shared, **changes, per_device_train_batch_size=8)
    two = arguments(task, **shared, **changes, output_dir=tmp_path / "two")
    if changes:
        cut_unevenly(one["train_file"])
    run(task, one)
    launch_ranks(2, SCRIPTS[task].__file__, *command_line(two), environment=ON_CPU)
    expected, actual = weights(one), weights(two)
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, atol=2e-4, rtol=1e-3, msg=name)
    for key, value in json.loads((tmp_path / "out" / "all_results.json").read_text()).items():
        if key in ("rows_per_update", "train_sampling_strategy"):
            continue
        other = json.loads((tmp_path / "two" / "all_results.json").read_text())[key]
        assert other == pytest.approx(value, rel=1e-3, abs=0.5 if key == "bleu" else 0), key
    folders = find_checkpoints(tmp_path / "two")
    assert [folder.name for folder in folders] == ["step_4"]


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


def test_tensorboard_gets_one_file(arguments):
    values = arguments("clm", attention_type="mae", cct_budgets=[1, 0.5], with_tracking=True,
                       report_to="tensorboard", logging_steps=2)  # fmt: skip
    run("clm", values)
    (path,) = Path(values["output_dir"]).rglob("events.out.tfevents.*")
    events = EventAccumulator(str(path), size_guidance={"histograms": 0, "scalars": 0})
    events.Reload()
    rows = [row for row in log(values) if "loss" in row]
    assert [e.value for e in events.Scalars("cct_noise_scale")] == pytest.approx(
        [row["cct_noise_scale"] for row in rows]
    )
    assert rows[-1]["cct_noise_scale"] > rows[0]["cct_noise_scale"] > 0
    assert len(events.Histograms("train/gate_entropy")) == len(rows)
    assert "learning_rate" in events.Tensors("args/text_summary")[0].tensor_proto.string_val[0].decode()


# Of transformers' scripts of the same names.
FLAGS = {
    "all": "dataset_name dataset_config_name train_file validation_file model_name_or_path config_name "
    "tokenizer_name use_slow_tokenizer per_device_train_batch_size per_device_eval_batch_size "
    "learning_rate weight_decay num_train_epochs max_train_steps gradient_accumulation_steps "
    "lr_scheduler_type num_warmup_steps output_dir seed model_type preprocessing_num_workers "
    "overwrite_cache push_to_hub hub_model_id hub_token trust_remote_code checkpointing_steps "
    "resume_from_checkpoint with_tracking report_to",
    "clm": "validation_split_percentage block_size no_keep_linebreaks low_cpu_mem_usage",
    "mlm": "validation_split_percentage max_seq_length line_by_line pad_to_max_length mlm_probability "
    "low_cpu_mem_usage",
    "translation": "predict_with_generate num_beams max_source_length max_target_length "
    "val_max_target_length pad_to_max_length ignore_pad_token_for_loss source_lang target_lang "
    "source_prefix max_length",
}


@pytest.mark.parametrize("task", SCRIPTS)
def test_flags_of_transformers_are_there_or_left_out_for_a_reason(task):
    script = SCRIPTS[task]
    texts = MaskedTextArguments if task == "mlm" else script.DataTrainingArguments
    kinds = (ModelArguments, texts, GatingArguments, AccelerateArguments)
    ours = {field.name for kind in kinds for field in fields(kind)}
    reasons = set(re.findall(r"^\| `(\w+)` \|", accelerate_arguments.__doc__, re.MULTILINE))
    theirs = {*FLAGS["all"].split(), *FLAGS[task].split()}
    assert theirs <= ours | reasons
    assert not ours & reasons
    assert reasons <= {flag for flags in FLAGS.values() for flag in flags.split()}


def test_card_says_how_the_model_was_made(arguments):
    values = arguments("translation", attention_type="mae", optim="adafactor", learning_rate=3e-2)
    values |= {"eval_steps": 2, "checkpointing_steps": 1, "average_checkpoints": 2}
    values |= {"hub_model_id": "me/model", "output_dir": values["output_dir"] / "mae"}
    metrics = run("translation", values)
    card = read_card(values["output_dir"] / "README.md")
    assert (card.data.pipeline_tag, card.data.tags) == ("translation", ["hf_moa", "mae"])
    assert card.data.metrics == ["bleu"]
    text = dict(split_sections(card.text)[1])
    assert '"me/model"' in text["How to load"]
    results = [line.split(" | ")[1:] for line in text["Results"].strip().splitlines()[2:]]
    assert {name: float(value.strip(" |")) for name, value in results} == {
        "Loss": pytest.approx(metrics["eval_loss"], rel=1e-3),
        "BLEU": pytest.approx(metrics["bleu"], rel=1e-3, abs=1e-3),
    }
    told = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", text["Training hyperparameters"], re.MULTILINE))
    expected = {
        "learning_rate": "0.03",
        "train_batch_size": "4",
        "total_train_batch_size": "8",
        "optimizer": "adafactor",
        "lr_scheduler_type": "linear",
        "mae_training": "bcd",
        "gate_every_n_epochs": "5",
        "average_checkpoints": "2",
        "steps_done": "4",
    }
    assert expected.items() <= told.items()
    assert "- Transformers " in text["Training hyperparameters"]
    assert "| training | not recorded | 40 |" in text["Training data"]
    steps = [line.split(" | ")[0] for line in text["Training results"].strip().splitlines()[2:]]
    assert steps == ["| 2", "| 4"]  # the last: before its checkpoints were averaged
    assert [entry["step"] for entry in evaluations(values)] == [2, 4]


def test_card_has_the_budgets(arguments):
    values = arguments("mlm", attention_type="mha", cct_budgets=[1, 0.5], eval_steps=4)
    metrics = run("mlm", values)
    folder = values["output_dir"]
    rows = json.loads((folder / "budget_results_validation.json").read_text())
    assert [row["budget"] for row in rows] == [1, 0.5]
    for row in rows:
        for name in ("eval_loss", "compute_fraction", "perplexity"):
            assert row[name] == metrics[f"{name}_at_{row['budget']:g}"] > 0
    text = dict(split_sections(read_card(folder / "README.md").text)[1])
    shown = budget_table([{k: row[k] for k in row if k != "eval_tokens"} for row in rows])
    assert shown in text["Compute budgets"]
    assert "seconds" not in text["Compute budgets"].lower()
    heads = text["Training results"].strip().splitlines()[0].strip("| ").split(" | ")
    names = ["eval loss", "compute fraction", "perplexity"]  # at the largest budget
    assert heads == ["step", "epoch", "training loss", *names]
    assert f"| Loss | {cell(rows[0]['eval_loss'])} |" in text["Results"]
    again = checkpoint_card(folder)  # what `hf-moa card` makes of the folder
    assert str(again) == (folder / "README.md").read_text()
    (folder / "README.md").unlink()
    alone = checkpoint_card(folder)
    assert alone.data.metrics == ["perplexity"]
    assert shown in alone.text


def test_a_card_that_cannot_be_read_stays(arguments):
    values = arguments("clm", attention_type="mae", max_train_steps=1)
    values["output_dir"].mkdir()
    broken = "---\nlicense: [\n---\nMine.\n"
    (values["output_dir"] / "README.md").write_text(broken)
    run("clm", values)
    assert (values["output_dir"] / "README.md").read_text() == broken
    assert (values["output_dir"] / "all_results.json").is_file()


def test_a_plain_model_has_no_card(arguments):
    values = arguments("clm", model_type="gpt2", max_train_steps=1)
    run("clm", values)
    assert not (values["output_dir"] / "README.md").exists()


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"checkpointing_steps": "often"}, "`checkpointing_steps` must be .*'often'"),
        ({"average_checkpoints": 2}, "`average_checkpoints` needs `checkpointing_steps`"),
        (
            {"average_checkpoints": 3, "checkpointing_steps": 2},
            "`average_checkpoints` must be at most 2",
        ),
        ({"optim": "sgd"}, "`optim` must be adamw or adafactor .*'sgd'"),
        ({"optim": "adafactor", "adam_beta2": 0.98}, "`adam_beta2` is AdamW's .*0.98"),
        (
            {"train_sampling_strategy": "sorted"},
            "`train_sampling_strategy` must be random or group_by_length .*'sorted'",
        ),
        (
            {"train_sampling_strategy": "group_by_length"},
            "`train_sampling_strategy` group_by_length needs sequences of several lengths",
        ),
        ({"eval_steps": 0}, "`eval_steps` must be at least 1"),
        ({"max_grad_norm": -1}, r"`max_grad_norm` must be at least 0, .*\(got -1"),
        (
            {"average_checkpoints": -1, "checkpointing_steps": 1},
            "`average_checkpoints` must be at least 0",
        ),
        ({"max_train_steps": 0}, "`max_train_steps` must be at least 1"),
        ({"eval_budgets": True}, "`eval_budgets` needs a model with budgets"),
        ({"mae_training": "bcd"}, "mae_training='bcd' needs a model with MAE"),
        ({"cct_noise_steps": 5}, "cct_noise_steps needs a model with CCT"),
        ({"resume_from_checkpoint": "nowhere"}, "`resume_from_checkpoint` must be .*nowhere"),
        ({"gradient_accumulation_steps": 0}, "`gradient_accumulation_steps` must be at least 1"),
        ({"train_file": None}, "train text is needed"),
    ],
)
def test_arguments_that_cannot_work_are_errors(changes, message, arguments):
    with pytest.raises(ValueError, match=message):
        run("clm", arguments("clm", **changes))
