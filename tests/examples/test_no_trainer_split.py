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
    assert results[1]["eval_loss"] == pytest.approx(results[0]["eval_loss"], rel=1e-5)
    for name in ("eval_tokens", "bleu", "compute_fraction"):
        assert results[1].get(name) == results[0].get(name)
    assert results[1]["step"] == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "task", ["clm", *(pytest.param(task, marks=pytest.mark.nightly) for task in ("mlm", "translation"))]
)
def test_split_over_two_processes_it_trains_as_one(task, arguments, tmp_path):
    """Evaluation and the files included; and it goes on in another form, from the parts of the first."""
    shared = REPEATABLE | {"config_overrides": f"{OVERRIDES[task]},{NO_DROPOUT[task]}"}
    one = arguments(task, **shared)
    run(task, one)
    sharded = one | {
        "output_dir": tmp_path / "sharded",
        "fsdp_size": 2,
        "per_device_train_batch_size": 4,
    }
    launch_ranks(2, SCRIPTS[task].__file__, *command_line(sharded))
    assert_same_run(one, sharded)
    again = one | {
        "output_dir": tmp_path / "again",
        "tp_size": 2,
        "resume_from_checkpoint": "latest",
    }
    shutil.copytree(tmp_path / "sharded" / "step_2", tmp_path / "again" / "step_2")
    launch_ranks(2, SCRIPTS[task].__file__, *command_line(again))
    assert_same_run(one, again)
    with pytest.raises(ValueError, match=r"holds a model in parts \(got none of the sizes .*tp_size"):
        run(task, again | {"tp_size": None})


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


def test_only_one_engine_shards(fresh_accelerator, monkeypatch, tmp_path):
    monkeypatch.setattr(Accelerator, "distributed_type", DistributedType.FSDP)
    args = AccelerateArguments(output_dir=str(tmp_path), use_cpu=True, fsdp_size=2)
    with pytest.raises(ValueError, match="fsdp_size=2 must be left out under FSDP of Accelerate"):
        make_accelerator(args)
