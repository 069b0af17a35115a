"""The README's Python runs, with tiny checkpoints in the place of the Hub's."""

import re
from pathlib import Path

import pytest
import torch
from families import CASE
from test_pipelines import tokenizer

from hf_moa import upcycle

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
CHECKPOINTS = {
    "google-bert/bert-base-uncased": "BertForMaskedLM",
    "openai-community/gpt2": "GPT2LMHeadModel",
    "google-t5/t5-small": "T5ForConditionalGeneration",
}


@pytest.fixture
def local_readme(tmp_path):
    """The README with paths in the place of names."""
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
