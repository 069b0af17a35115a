"""The README's Python runs, with tiny checkpoints instead of the Hub's."""

import importlib.util
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
from families import CASE
from test_pipelines import tokenizer

from hf_moa import upcycle

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
CHECKPOINTS = {
    "google-bert/bert-base-uncased": "BertForMaskedLM",
    "openai-community/gpt2": "GPT2LMHeadModel",
    "google-t5/t5-small": "T5ForConditionalGeneration",
}


@pytest.fixture
def local_readme(tmp_path):
    """The README with paths instead of names."""
    text = README
    for name, class_name in CHECKPOINTS.items():
        case, path = CASE[class_name], tmp_path / class_name
        source = case.build_plain()
        source.save_pretrained(path)
        tokenizer(case).save_pretrained(path)
        text = text.replace(name, str(path))
    upcycle(CASE["BertForMaskedLM"].build_plain(), "mae").save_pretrained(tmp_path / "gated")
    return text.replace("user/model", str(tmp_path / "gated"))


def test_python_of_the_readme_runs(local_readme, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", local_readme, flags=re.DOTALL)
    assert len(blocks) >= 4
    torch.manual_seed(0)
    names = {"upcycle": upcycle}
    exec("from transformers import AutoModelForMaskedLM", names)
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)


def test_commands_of_the_readme_run(local_readme, tmp_path, monkeypatch, capsys):
    """Those of `hf-moa` that stand there; `quickstart` has tests of its own."""
    from hf_moa.cli import main

    commands = re.findall(r"^hf-moa ([^#\n]*)", local_readme, flags=re.MULTILINE)
    assert {command.split()[0] for command in commands} == {"upcycle", "analyze", "benchmark", "card"}
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dev.tsv").write_text("sentence\tlabel\nthe head of a head\t1\nattention\t0\n")
    for command in commands:
        assert main(command.split()) == 0
        assert capsys.readouterr().out
    assert (tmp_path / "gates.html").is_file()


def commands_of(readme):
    """The commands in the README's blocks, each as one line."""
    blocks = "".join(re.findall(r"```bash\n(.*?)```", readme, flags=re.DOTALL))
    return blocks.replace("\\\n", " ").splitlines()


def test_every_command_of_the_readme_is_tested():
    """By the two tests here, by those of the quickstart, or by installing and running the tests."""
    kinds = (
        "hf-moa ",
        "python examples/run_",
        "accelerate launch ",
        "python3 -m venv .venv ",
        "pytest ",
    )
    assert all(command.startswith(kinds) for command in commands_of(README))


# What makes the scripts' runs short.
SHORT = {
    "run_glue.py": "--data_dir glue --max_seq_length 32 --max_steps 2 --use_cpu --report_to none",
    "run_clm.py": "--block_size 32 --max_steps 2 --use_cpu --report_to none",
    "run_translation.py": "--max_steps 2 --use_cpu --report_to none",
    "run_clm_no_trainer.py": "--block_size 32 --max_train_steps 2",
}


@pytest.fixture
def corpora(tmp_path):
    """The files that the README names."""
    lines = "a head may be a head of the attention , or none at all .\n" * 60
    for name in ("train.txt", "valid.txt", "test.txt", "train.en", "train.de", "test.en", "test.de"):
        (tmp_path / name).write_text(lines if "train" in name else "a head of the attention\n" * 40)
    (tmp_path / "glue" / "SST-2").mkdir(parents=True)
    for split in ("train", "dev"):
        rows = [f"{word} head\t{label}" for word in ("the", "a", "no") for label in (0, 1)]
        text = "\n".join(["sentence\tlabel", *rows, ""])
        (tmp_path / "glue" / "SST-2" / f"{split}.tsv").write_text(text)


@pytest.mark.slow
def test_scripts_of_the_readme_run(local_readme, corpora, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    commands = [c for c in commands_of(local_readme) if c.startswith(("python examples", "accelerate"))]
    assert len(commands) == 5
    for command in commands:
        words = shlex.split(command)
        script = next(word for word in words if word.startswith("examples/run_"))
        arguments = words[words.index(script) + 1 :] + SHORT[Path(script).name].split()
        name = Path(script).stem
        spec = importlib.util.spec_from_file_location(name, ROOT / script)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)  # where the arguments' types are looked up
        spec.loader.exec_module(module)
        module.main(arguments)
        output = Path(words[words.index("--output_dir") + 1])
        assert (output / "model.safetensors").is_file(), command
    assert "Compute budgets" in Path("out/sst2-cct/README.md").read_text()
