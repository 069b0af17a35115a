"""Accelerate scripts whose model is split over processes."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator, DistributedType
from accelerate_runs import NO_DROPOUT, OVERRIDES, SCRIPTS, run, weights
from launching import launch_ranks
from script_runs import command_line

from hf_moa.recipes.accelerate import AccelerateArguments
from hf_moa.recipes.accelerate.arguments import make_accelerator
from hf_moa.recipes.accelerate.checkpoints import (
    Progress,
    check_averaging,
    checkpoint_to_resume,
    progress_of,
)
from hf_moa.recipes.accelerate.optimizers import make_optimizer

# nothing is drawn but the order of the data; all forms normalise gates over as many sequences
REPEATABLE = {
    "attention_type": "mae",
    "mae_training": "joint",
    "mae_gate_dropout": 0,
    "learning_rate": 1e-3,
    "checkpointing_steps": 2,
    "per_device_train_batch_size": 8,
}


def assert_same_run(one, other):
    expected, actual = weights(one), weights(other)
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, atol=2e-4, rtol=1e-3, msg=name)
    results = [json.loads(Path(v["output_dir"], "all_results.json").read_text()) for v in (one, other)]
    assert results[1].keys() == results[0].keys()
    for name in results[0].keys() - {"rows_per_update", "train_sampling_strategy", "batches_in_epoch"}:
        assert results[1][name] == pytest.approx(results[0][name], rel=1e-4), name
    assert results[1]["step"] == 4


SHARDED = {"fsdp_size": 2, "per_device_train_batch_size": 4}
SPREAD = {"tp_size": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "first", "second"),
    [
        ("clm", SPREAD, SHARDED),
        pytest.param("mlm", SHARDED, SPREAD, marks=pytest.mark.nightly),
        pytest.param("translation", SPREAD, SHARDED, marks=pytest.mark.nightly),
    ],
    ids=["clm", "mlm", "translation"],
)
def test_split_over_two_processes_it_trains_as_one(task, first, second, arguments, tmp_path):
    """Evaluation and the files included; and it goes on in another form, from the parts of the first."""
    shared = REPEATABLE | {"config_overrides": f"{OVERRIDES[task]},{NO_DROPOUT[task]}"}
    if task == "clm":
        shared |= {"attention_type": "mha", "mae_training": None, "mae_gate_dropout": None}
        shared |= {"nested_budgets": [1, 0.75], "nested_heads": [4, 3]}  # heads that do not divide
    one = arguments(task, **shared)
    run(task, one)
    split = one | first | {"output_dir": tmp_path / "split"}
    launch_ranks(2, SCRIPTS[task].__file__, *command_line(split))
    assert_same_run(one, split)
    again = one | second | {"output_dir": tmp_path / "again", "resume_from_checkpoint": "latest"}
    shutil.copytree(tmp_path / "split" / "step_2", tmp_path / "again" / "step_2")
    launch_ranks(2, SCRIPTS[task].__file__, *command_line(again))
    assert_same_run(one, again)
    whole = {name: None for name in second if name.endswith("_size") and "batch" not in name}
    with pytest.raises(ValueError, match=r"holds a model in parts \(got none of the sizes .*tp_size"):
        run(task, again | whole | {"per_device_train_batch_size": 8})


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize(
    "sizes",
    [
        {"tp_size": 2, "fsdp_size": 2, "per_device_train_batch_size": 4},
        {"fsdp_size": 2, "dp_replicate_size": 2, "per_device_train_batch_size": 2},
        {"fsdp_size": 4, "ep_size": 4, "per_device_train_batch_size": 2},
    ],
    ids=["tensor and shards", "copies of shards", "experts"],
)
def test_split_over_four_processes_it_trains_as_one(sizes, arguments, tmp_path):
    """Sparse experts too, whose losses are of the batch of all processes."""
    experts = {"ffn_type": "moe", "num_ffn_experts": 4, "router_global_balance": True}
    overrides = f"{OVERRIDES['clm']},{NO_DROPOUT['clm']},tie_word_embeddings=False"
    one = arguments("clm", **REPEATABLE | experts, config_overrides=overrides)
    run("clm", one)
    four = one | sizes | {"output_dir": tmp_path / "four"}
    launch_ranks(4, SCRIPTS["clm"].__file__, *command_line(four))
    assert_same_run(one, four)


def test_parts_need_a_checkpoint_of_parts(arguments):
    values = arguments("clm", checkpointing_steps=2, max_train_steps=2)
    run("clm", values)
    args = AccelerateArguments(
        output_dir=str(values["output_dir"]), tp_size=2, resume_from_checkpoint="latest"
    )
    message = r"holds a whole model \(got some of the sizes that split one\): leave them out"
    now = Progress(rows_per_update=(4, 2, 1), seed=42)
    with pytest.raises(ValueError, match=message):
        progress_of(checkpoint_to_resume(args), now, is_split=args.is_split)


def test_whole_weights_are_needed_for_some(tmp_path):
    accelerator = SimpleNamespace(distributed_type=DistributedType.MULTI_CPU)
    args = AccelerateArguments(output_dir=str(tmp_path), optim="adafactor", fsdp_size=2)
    with pytest.raises(ValueError, match=r"`optim` adafactor takes .* under fsdp_size=2"):
        make_optimizer(args, torch.nn.Linear(2, 2), accelerator, gates=True)
    args = AccelerateArguments(
        output_dir=str(tmp_path), tp_size=2, average_checkpoints=1, checkpointing_steps="1"
    )
    with pytest.raises(ValueError, match=r"`average_checkpoints` needs .* those of tp_size=2 do not"):
        check_averaging(
            args, updates=2, updates_per_epoch=2, distributed_type=accelerator.distributed_type
        )


def test_sizes_are_those_of_the_processes(arguments):
    with pytest.raises(
        ValueError, match=r"`tp_size` .* must be the number of processes \(got 2 and 1\)"
    ):
        run("clm", arguments("clm", tp_size=2))


def test_only_one_engine_shards(fresh_accelerator, monkeypatch, tmp_path):
    monkeypatch.setattr(Accelerator, "distributed_type", DistributedType.FSDP)
    args = AccelerateArguments(output_dir=str(tmp_path), use_cpu=True, fsdp_size=2)
    with pytest.raises(ValueError, match="fsdp_size=2 must be left out under FSDP of Accelerate"):
        make_accelerator(args)
