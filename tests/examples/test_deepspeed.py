"""The Accelerate scripts under DeepSpeed ZeRO-3, on two CPU processes."""

import shutil
from pathlib import Path

import pytest
import torch
from accelerate.commands.launch import launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env
from accelerate_runs import SCRIPTS, weights
from launching import ON_CPU, launch_ranks
from script_runs import command_line
from transformers import AutoConfig, AutoModelForCausalLM

from hf_moa.quickstart.tokenizer import train_tokenizer

pytest.importorskip("deepspeed")

ZERO_3 = (
    *("--use_deepspeed", "--zero_stage", "3", "--zero3_init_flag", "false"),
    *("--zero3_save_16bit_model", "true", "--gradient_clipping", "1.0"),
    *(
        "--num_machines",
        "1",
        "--num_processes",
        "2",
        "--mixed_precision",
        "no",
        "--main_process_port",
        "0",
    ),
)
VARIANTS = {
    "mae": {"attention_type": "mae", "mae_gate_dropout": 0},
    "moa": {"attention_type": "moa", "num_attention_experts": 8},
    "cct": {"cct_budgets": [1, 0.5], "cct_noise_max": 0},
}


def run_under_deepspeed(values):
    """In two processes that are told what `accelerate launch` tells them."""
    script = SCRIPTS["clm"].__file__
    options = launch_command_parser().parse_args([*ZERO_3, script])
    options.deepspeed_fields_from_accelerate_config = ""  # there is no such file
    _, environment = prepare_deepspeed_cmd_env(options)
    told = {name: value for name, value in environment.items() if name.startswith("ACCELERATE_")}
    wrapper = Path(__file__).with_name("deepspeed_on_cpu.py")
    launch_ranks(
        2,
        wrapper,
        script,
        *command_line(values),
        environment=told | {"DS_ACCELERATOR": "cpu"},
        timeout=600,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "variant", ["mae", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("moa", "cct"))]
)
def test_zero_3_is_data_parallelism_and_resumes_exactly(arguments, tmp_path, variant):
    base = tmp_path / "base"
    tokenizer = train_tokenizer(["a gate chooses some heads and skips the rest of them ."], 64)
    tokenizer.eos_token = tokenizer.sep_token
    tokenizer.save_pretrained(base)
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 16, "vocab_size": len(tokenizer)}
    sizes |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0)
    config = AutoConfig.for_model("moa_gpt2", **sizes, **VARIANTS[variant])
    AutoModelForCausalLM.from_config(config).save_pretrained(base)

    values = arguments(
        "clm",
        model_type=None,
        config_overrides=None,
        model_name_or_path=base,
        mae_training="joint" if variant == "mae" else None,
        cct_noise_steps=-1 if variant == "cct" else None,
        max_train_steps=4,
        checkpointing_steps=2,
        learning_rate=1e-3,
        gradient_accumulation_steps=1,
        per_device_train_batch_size=2,
    )
    parallel = {**values, "output_dir": tmp_path / "parallel"}
    launch_ranks(2, SCRIPTS["clm"].__file__, *command_line(parallel), environment=ON_CPU)
    sharded = {**values, "use_cpu": None, "output_dir": tmp_path / "sharded"}
    run_under_deepspeed(sharded)
    assert list((tmp_path / "sharded" / "step_4").rglob("zero_pp_rank_*"))  # DeepSpeed's own files
    expected, found = weights(parallel), weights(sharded)
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-5, atol=1e-6, msg=name)

    shutil.rmtree(tmp_path / "sharded" / "step_4")
    (tmp_path / "sharded" / "model.safetensors").unlink()
    run_under_deepspeed({**sharded, "resume_from_checkpoint": "latest"})
    resumed = weights(sharded)
    assert all(torch.equal(resumed[name], weight) for name, weight in found.items())
