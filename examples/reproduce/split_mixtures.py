"""Mixtures of many experts, split over processes: what each process holds, how evenly the experts of
each are used, with the routers' losses and without, and what it costs if one process has all the work.

    torchrun --nproc_per_node 4 examples/reproduce/split_mixtures.py --train_file train.txt
    python examples/reproduce/split_mixtures.py --device_map   # one process, half of the layers on disk

A process writes a new model; the others load it with it, each its part. The text's bytes are its tokens.
On a CPU the processes talk by gloo.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from tqdm import tqdm
from transformers import HfArgumentParser
from transformers.distributed import DistributedConfig

from hf_moa import MoaGPT2Config, MoaGPT2LMHeadModel

SIZES = {"vocab_size": 256, "n_positions": 128, "n_embd": 128, "n_layer": 2, "n_head": 8, "n_inner": 128}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MIXTURES: dict[str, dict[str, Any]] = {
    "2 of 1,024 feed-forward experts": {
        "ffn_type": "moe",
        "num_ffn_experts": 1024,
        "num_ffn_experts_per_token": 2,
    },
    "8 of 256 attention experts": {
        "attention_type": "moa",
        "num_attention_experts": 256,
        "head_dim": 32,
    },
}
NO_LOSSES = {"router_balance_loss_coef": 0.0, "router_z_loss_coef": 0.0}


@dataclass
class Options:
    """What is run."""

    train_file: str = field(metadata={"help": "text to train on; its last tenth is what loads are of"})
    steps: int = field(default=120, metadata={"help": "updates"})
    batch_size: int = field(default=8, metadata={"help": "sequences of each process"})
    learning_rate: float = field(default=1e-3, metadata={"help": "of AdamW"})
    router_balance_loss_coef: float | None = field(
        default=None, metadata={"help": "of runs with it instead of those with the default and none"}
    )
    results: str = field(default="out/split_mixtures.jsonl", metadata={"help": "a line for each run"})


def main() -> None:
    (options,) = HfArgumentParser(Options).parse_args_into_dataclasses()
    if options.steps < 1:
        raise ValueError(f"--steps must be at least 1 (got {options.steps}).")
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    for name, fields in MIXTURES.items():
        for losses in coefficients(options):
            measured = run(fields | losses, options)
            settings = {"mixture": name, "losses": losses, "processes": dist.get_world_size()}
            settings |= {"steps": options.steps, "batch_size": options.batch_size}
            if dist.get_rank() == 0:
                Path(options.results).parent.mkdir(parents=True, exist_ok=True)
                with open(options.results, "a", encoding="utf-8") as file:
                    file.write(json.dumps({"settings": settings, "measured": measured}) + "\n")
    dist.destroy_process_group()


def coefficients(options: Options) -> list[dict[str, float]]:
    """Those of the routers' losses, of each run; nothing stands for the defaults."""
    balance = options.router_balance_loss_coef
    return [{}, NO_LOSSES] if balance is None else [{"router_balance_loss_coef": balance}]


def run(fields: dict[str, Any], options: Options) -> dict[str, Any]:
    """Load a new model split, train it, and measure it."""
    number, rank = dist.get_world_size(), dist.get_rank()
    is_moe = fields.get("ffn_type") == "moe"
    sizes = {"ep_size": number, "fsdp_size": number} if is_moe else {"tp_size": number}
    with tempfile.TemporaryDirectory() as folder:
        shared = [folder]
        dist.broadcast_object_list(shared)
        if rank == 0:  # in a process of its own: this one's memory is measured
            in_new_process("--write", shared[0], json.dumps(fields))
        dist.barrier()
        with PeakMemory() as peak:
            model = MoaGPT2LMHeadModel.from_pretrained(
                shared[0], distributed_config=DistributedConfig(**sizes)
            )
            for parameter in model.parameters():  # until then they are only mapped
                own(parameter).sum()
        dist.barrier()
    held = sum(own_bytes(p) for p in model.parameters())
    measured = {
        "bytes_of_model": sum(p.numel() * p.element_size() for p in model.parameters()),
        "bytes_of_process": every(held),
        "peak_of_loading": every(peak.bytes),
    }

    data = torch.tensor(list(Path(options.train_file).read_bytes()))
    length = model.config.n_positions
    data = data[: len(data) // length * length].view(-1, length)
    train, test = data[: -len(data) // 10], data[-len(data) // 10 :]
    # processes that share attention experts have one batch
    generator = torch.Generator().manual_seed(rank if is_moe else 0)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    losses = []
    start = time.perf_counter()
    for _ in tqdm(range(options.steps), disable=rank > 0, desc=str(sizes)):
        rows = torch.randint(len(train), (options.batch_size,), generator=generator)
        output = model(train[rows], labels=train[rows])
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(task_loss(output).item())
    measured["seconds_of_step"] = (time.perf_counter() - start) / options.steps
    state = [s for states in optimizer.state.values() for s in states.values() if s.ndim > 0]
    measured["bytes_of_optimizer"] = every(sum(map(own_bytes, state)))
    measured["task_loss"] = [losses[0], sum(losses[-20:]) / len(losses[-20:])]

    model.eval()
    with torch.no_grad():
        output = model(test[:64], labels=test[:64])
    measured["test_loss"] = task_loss(output).item()
    (load,) = output.expert_load.values()  # [layers, N]
    measured["load_of_processes"] = load.unflatten(-1, (number, -1)).sum(dim=-1).tolist()
    measured["most_of_an_expert"] = (load.max(dim=-1).values * load.shape[-1]).tolist()
    measured["experts_without_tokens"] = load.eq(0).sum(dim=-1).tolist()

    rows = train[: options.batch_size]
    model.train()
    for name, start_router in {"even": nn.init.normal_, "worst": nn.init.zeros_}.items():
        torch.manual_seed(rank if is_moe else 0)
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("router.gate.weight"):
                start_router(own(parameter))
        measured[f"seconds_{name}"] = statistics.median(timed(model, rows) for _ in range(5))
    return measured


def timed(model: nn.Module, rows: torch.Tensor) -> float:
    """Seconds of a forward and a backward."""
    dist.barrier()
    start = time.perf_counter()
    model(rows, labels=rows).loss.backward()
    dist.barrier()
    model.zero_grad()
    return time.perf_counter() - start


def task_loss(output: Any) -> torch.Tensor:
    """The loss without those of the routers."""
    return output.loss if output.task_loss is None else output.task_loss


def write(folder: str, fields: dict[str, Any]) -> None:
    """A new model."""
    torch.manual_seed(0)
    MoaGPT2LMHeadModel(MoaGPT2Config(**SIZES, **NO_DROPOUT, **fields)).save_pretrained(folder)


def load_half(folder: str, name: str) -> None:
    """Print what loading adds to the memory, if every other layer stays on disk."""
    places: dict[str, Any] = {"transformer.h.1": "disk"}
    others = ("transformer.wte", "transformer.wpe", "transformer.h.0", "transformer.ln_f", "lm_head")
    places |= dict.fromkeys(others, "cpu")
    with PeakMemory() as peak:
        model = MoaGPT2LMHeadModel.from_pretrained(
            folder, device_map=places, offload_folder=f"{folder}/offloaded"
        )
        here = [p for p in model.parameters() if p.device.type == "cpu"]
        for parameter in here:
            parameter.sum()
    total, held = (sum(map(own_bytes, each)) for each in (model.parameters(), here))
    print(f"{name}: {total:,} bytes, {held:,} here; loading added {peak.bytes:,}")


def in_new_process(*arguments: str) -> None:
    subprocess.run([sys.executable, __file__, *arguments], check=True)


def own(tensor: torch.Tensor) -> torch.Tensor:
    """What this process has of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def own_bytes(tensor: torch.Tensor) -> int:
    return own(tensor).numel() * tensor.element_size()


def every(value: float) -> list[float]:
    """What each process has."""
    values = [0.0] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


class PeakMemory:
    """The most memory that this process has while a block runs, above what it had: Linux' `VmRSS`,
    looked at every few milliseconds. It counts pages of mapped files that were read.

    Attributes:
        bytes: afterwards.
    """

    def __enter__(self) -> PeakMemory:
        self._before = self._most = _resident()
        self._is_done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._is_done.wait(0.002):
            self._most = max(self._most, _resident())

    def __exit__(self, *error: object) -> None:
        self._is_done.set()
        self._thread.join()
        self.bytes = max(self._most, _resident()) - self._before


def _resident() -> int:
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    if sys.argv[1:2] == ["--write"]:
        write(sys.argv[2], json.loads(sys.argv[3]))
    elif sys.argv[1:2] == ["--load"]:
        load_half(*sys.argv[2:])
    elif sys.argv[1:2] == ["--device_map"]:
        for mixture, its_fields in MIXTURES.items():
            with tempfile.TemporaryDirectory() as its_folder:
                in_new_process("--write", its_folder, json.dumps(its_fields))
                in_new_process("--load", its_folder, mixture)
    else:
        main()
