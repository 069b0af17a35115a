"""What each of two processes does in test_processes.py; the first writes what came out."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from scenarios import SCENARIOS, SETTINGS, teacher_of
from training_runs import build, gates, trainer, uneven_rows


def train(name: str, folder: Path) -> None:
    """Two updates on the whole data set; fails where the processes end with different parameters."""
    scenario = SCENARIOS[name]
    model = build(scenario.backbone, **scenario.fields)
    made = trainer(
        scenario.backbone,
        model,
        folder / name,
        data=list(uneven_rows(scenario.backbone)) if scenario.uneven else None,
        teacher=teacher_of(scenario),
        **SETTINGS
        | {"ddp_find_unused_parameters": False, "per_device_train_batch_size": 4}
        | scenario.arguments,
    )
    before = gates(model)
    made.train()
    moved = [key for key, value in gates(model).items() if not torch.equal(value, before[key])]
    assert bool(moved) == scenario.moves_gates, (name, moved)
    for key, tensor in model.state_dict().items():
        if ".norm.running" in key and not made.args.sync_gate_norm:
            continue  # each process has its own, and the first one's are saved
        others = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(others, tensor.contiguous())
        assert torch.equal(*others), (name, key)
    if dist.get_rank() == 0:
        save_file(
            {key: tensor.clone() for key, tensor in model.state_dict().items()},
            folder / f"{name}.safetensors",
        )


if __name__ == "__main__":
    for scenario in sys.argv[2:]:
        train(scenario, Path(sys.argv[1]))
    dist.destroy_process_group()
