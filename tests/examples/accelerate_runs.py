"""Runs of the Accelerate scripts for tests: tiny models, and what they wrote."""

import json
from pathlib import Path

import run_clm_no_trainer
import run_mlm_no_trainer
import run_translation_no_trainer
import torch
from accelerate_state import forget_accelerator
from safetensors.torch import load_file
from script_runs import command_line

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
NO_DROPOUT = {
    "clm": "resid_pdrop=0,embd_pdrop=0,attn_pdrop=0",
    "mlm": "hidden_dropout_prob=0,attention_probs_dropout_prob=0",
    "translation": "dropout_rate=0",
}


def made_up_lines(count, seed):
    words = ["a", "gate", "chooses", "some", "heads", "and", "skips", "the", "rest", "of", "them"]
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        picked = torch.randint(len(words), (7,), generator=generator).tolist()
        yield " ".join(words[i] for i in picked) + " .\n"


def make_arguments(folder, task, **changes):
    """Flags of a run on texts made up in the folder."""
    for name, seed in (("train", 0), ("valid", 1)):
        lines = list(made_up_lines(40 if name == "train" else 9, seed))
        (folder / f"{name}.en").write_text("".join(lines))
        (folder / f"{name}.de").write_text("".join(line.upper() for line in lines))
    kinds = {"clm": "moa_gpt2", "mlm": "moa_bert", "translation": "moa_t5"}
    values = {
        "model_type": kinds[task],
        "config_overrides": OVERRIDES[task],
        "vocab_size": 300,
        "output_dir": folder / "out",
        "use_cpu": True,
        "max_train_steps": 4,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
    }
    if task == "translation":
        values |= {"train_source": folder / "train.en", "train_target": folder / "train.de"}
        values |= {"validation_source": folder / "valid.en", "max_target_length": 12}
        values |= {"validation_target": folder / "valid.de", "num_beams": 2}
    else:
        values |= {"train_file": folder / "train.en", "validation_file": folder / "valid.en"}
    if task == "mlm":
        values |= {"max_seq_length": 16}
    return {**values, **changes}


def cut_unevenly(path):
    """The lines of a text to 2 to 6 words each."""
    lines = enumerate(path.read_text().splitlines())
    path.write_text("".join(" ".join(line.split()[: 2 + i % 5]) + "\n" for i, line in lines))


def run(task, values):
    forget_accelerator()
    return SCRIPTS[task].main(command_line(values))


def weights(values):
    return load_file(Path(values["output_dir"]) / "model.safetensors")


def log(values):
    """The lines on training."""
    return [entry for entry in _lines(values) if "loss" in entry]


def evaluations(values):
    """The lines on evaluations on the way."""
    return [entry for entry in _lines(values) if "loss" not in entry]


def _lines(values):
    lines = (Path(values["output_dir"]) / "log.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]
