"""Runs of `examples/run_glue.py` for tests: a tiny random BERT on a tiny MRPC."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from few_words import WORDS, write_tokenizer
from script_runs import ON_TRAINER
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertModel,
)

SCRIPT = Path(__file__).parents[2] / "examples" / "run_glue.py"


@pytest.fixture(scope="module")
def run_glue():
    spec = importlib.util.spec_from_file_location("run_glue", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    # HfArgumentParser looks the module up to resolve the dataclasses' annotations.
    sys.modules["run_glue"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["run_glue"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A bare BERT encoder with its tokenizer."""
    path = tmp_path_factory.mktemp("checkpoint")
    vocab_size = write_tokenizer(path)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=32,
    )
    BertModel(config).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def glue_dir(tmp_path_factory):
    """MRPC in its published form: 24 training, 7 development and 5 test pairs."""
    path = tmp_path_factory.mktemp("glue")
    (path / "MRPC").mkdir()

    def write(name, first_column, num_rows):
        rows = [[first_column, "#1 ID", "#2 ID", "#1 String", "#2 String"]]
        for i in range(num_rows):
            first = f"the {WORDS[2 + i % 2]} sat on the {WORDS[8 + i % 2]} ."
            second = first if i % 3 else "it was not very red ."
            label = str(int(i % 3 > 0)) if first_column == "Quality" else str(i)
            rows.append([label, str(i), str(i), first, second])
        lines = "".join("\t".join(row) + "\n" for row in rows)
        (path / "MRPC" / name).write_text(lines, encoding="utf-8-sig")

    write("train.tsv", "Quality", 24)
    write("dev.tsv", "Quality", 7)
    write("test.tsv", "index", 5)
    return str(path)


@pytest.fixture
def glue_arguments(checkpoint, glue_dir, tmp_path):
    return {
        "model_name_or_path": checkpoint,
        "task_name": "mrpc",
        "data_dir": glue_dir,
        "max_seq_length": 24,
        "output_dir": str(tmp_path / "out"),
        **ON_TRAINER,
        "max_steps": 3,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "learning_rate": 1e-3,
        "seed": 3,
    }


def saved_model(arguments):
    return AutoModelForSequenceClassification.from_pretrained(arguments["output_dir"])
