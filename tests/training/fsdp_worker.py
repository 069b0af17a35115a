"""What each of two processes does in test_fsdp.py: train a sharded model, and write it whole."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from accelerate import FullyShardedDataParallelPlugin, state
from accelerate.utils import DistributedType
from safetensors.torch import save_file
from scenarios import SETTINGS
from torch.distributed.tensor import DTensor
from training_runs import build, gates, trainer

from hf_moa.training import TrainingDivergedError

LAYERS = {"gpt2": "MoaGPT2Block", "bert": "MoaBertLayer"}
MODELS = {
    "gpt2": {"attention_type": "mae"},
    "gpt2-gates": {"attention_type": "mae"},  # experts stand still
    "gpt2-accumulated": {"attention_type": "mae"},
    "bert": {"attention_type": "mae", "cct_budgets": [1, 0.5]},
    "bert-moa": {"attention_type": "moa", "ffn_type": "moe"},
    "bert-self": {"cct_budgets": [1, 0.5], "cct_noise_max": 0.0, "cct_budget_loss_coef": 0.0},
    "bert-taught": {},
}
# nothing is drawn: as one process does
TAUGHT = {
    "bert-self": {"distillation_hidden_weight": 0.0, **SETTINGS},
    "bert-taught": {"distillation_hidden_weight": 0.0, **SETTINGS},
}
STANDING = ("gpt2-gates", "gpt2-accumulated")


def shard_on_the_cpu() -> None:
    """Let Accelerate, which knows FSDP only on accelerators, shard on the CPU too."""
    initialise = state.AcceleratorState.__init__

    def with_fsdp(self, *args, fsdp_plugin=None, **kwargs):
        plugin = fsdp_plugin or FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=[os.environ["FSDP_LAYER"]],
            cpu_ram_efficient_loading=False,
            state_dict_type=os.environ.get("FSDP_STATE_DICT", "SHARDED_STATE_DICT"),
        )
        initialise(self, *args, fsdp_plugin=plugin, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.FSDP
            self.fsdp_plugin = plugin

    state.AcceleratorState.__init__ = with_fsdp


def teacher_of(name: str) -> Any:
    """What a model of `TAUGHT` learns from."""
    if name not in TAUGHT:
        return None
    return "self" if name == "bert-self" else build("bert", seed=5)


def train(name: str, folder: Path) -> None:
    backbone = name.split("-")[0]
    os.environ["FSDP_LAYER"] = LAYERS[backbone]
    state.AcceleratorState._reset_state()
    model = build(backbone, **MODELS[name])
    before = gates(model)
    made = trainer(
        backbone,
        model,
        folder / name,
        teacher=teacher_of(name),
        **{"max_steps": 2, "learning_rate": 0.0 if name in STANDING else 1e-3} | TAUGHT.get(name, {}),
        per_device_train_batch_size=2 if name == "gpt2-accumulated" else 4,
        gradient_accumulation_steps=2 if name == "gpt2-accumulated" else 1,
        save_strategy="steps",
        save_steps=2,
    )
    made.train()
    assert all(isinstance(p, DTensor) for p in made.model.parameters())
    whole = made.accelerator.get_state_dict(made.model)
    if dist.get_rank() == 0:
        moved = [key for key in before if not before[key].equal(whole[key])]
        assert bool(moved) == bool(before), name
        save_file({k: v.clone() for k, v in whole.items()}, folder / f"{name}.safetensors")
    dist.barrier()


def save_whole(folder: Path) -> None:
    """A model that `Trainer` gathers, as `FULL_STATE_DICT` asks for."""
    os.environ["FSDP_LAYER"], os.environ["FSDP_STATE_DICT"] = LAYERS["gpt2"], "FULL_STATE_DICT"
    state.AcceleratorState._reset_state()
    made = trainer("gpt2", build("gpt2", **MODELS["gpt2"]), folder / "whole")
    made.train()
    made.save_model(str(folder / "whole"))
    dist.barrier()


def diverge(folder: Path) -> None:
    """In the first G step; with checkpoints that would be sharded."""
    os.environ["FSDP_LAYER"] = LAYERS["gpt2"]
    state.AcceleratorState._reset_state()
    model = build("gpt2", **MODELS["gpt2"])
    model.transformer.wte.register_forward_hook(lambda *call: call[-1] * float("nan"))
    try:
        trainer("gpt2", model, folder / "diverging").train()
    except TrainingDivergedError as error:
        (folder / f"message-{dist.get_rank()}").write_text(str(error))
    dist.barrier()


if __name__ == "__main__":
    shard_on_the_cpu()
    for each in MODELS:
        train(each, Path(sys.argv[1]))
    diverge(Path(sys.argv[1]))
    save_whole(Path(sys.argv[1]))
    dist.destroy_process_group()
