"""How to load a model: the snippets of cards run."""

import pytest
import torch
from cards import execute, python_of, saved
from families import CASE, CASES
from launching import fresh_python

from hf_moa.model_card import checkpoint_card, write_card


@pytest.mark.covering
@pytest.mark.parametrize("with_tokenizer", [True, False], ids=["tokenizer", "ids"])
@pytest.mark.parametrize("case", CASES, ids=CASE)
def test_snippets_run(case, with_tokenizer, tmp_path, monkeypatch, capsys):
    model = saved(case, tmp_path / "out", with_tokenizer=with_tokenizer, cct_budgets=[1, 0.5, 1])
    with_package, alone = python_of(checkpoint_card(tmp_path / "out"))
    monkeypatch.chdir(tmp_path)
    names = execute(with_package)
    assert type(names["model"]) is case.gated
    comment, line = with_package.splitlines()[-2:]
    assert comment == "# of the budgets 1, 0.5; without one, the largest:"
    assert line.startswith("outputs = model")
    assert line.endswith(", budget=0.5)")
    assert ("tokenizer" in names) == with_tokenizer
    loaded = execute(alone)["model"]
    for key, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], tensor), key


@pytest.mark.parametrize(
    ("name", "budget"),
    [("T5ForConditionalGeneration", "(0.5, 0.5)"), ("T5EncoderModel", "0.5")],
)
def test_snippets_run_with_pairs_of_budgets(name, budget, tmp_path, monkeypatch):
    saved(CASE[name], tmp_path / "out", cct_budgets=[[1, 1], [1, 0.5], [0.5, 0.5]])
    code = python_of(checkpoint_card(tmp_path / "out"))[0]
    assert f"budget={budget})" in code
    monkeypatch.chdir(tmp_path)
    execute(code)


ALONE = """
import re, sys
sys.modules["hf_moa"] = None  # as where it is not installed
for name in sys.argv[1:]:
    card = open(f"{name}/README.md", encoding="utf-8").read()
    names = {}
    exec(re.findall(r"```python\\n(.*?)```", card, flags=re.DOTALL)[1], names)
    assert type(names["model"]).__module__.startswith("transformers_modules"), type(names["model"])
    names["tokenizer"]("a head")
    print(type(names["model"]).__name__)
"""


def test_snippets_run_without_the_package(tmp_path):
    classes = ["BertForSequenceClassification", "GPT2LMHeadModel", "T5ForConditionalGeneration"]
    for name in classes:
        saved(CASE[name], tmp_path / name, attention_type="mae")
        write_card(checkpoint_card(tmp_path / name), tmp_path / name / "README.md")
    done = fresh_python(ALONE, *classes, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [f"Moa{name}" for name in classes]


def test_checkpoint_without_code_does_not_promise_it(tmp_path):
    saved(CASE["BertModel"], tmp_path)
    (tmp_path / "modeling_moa_bert.py").unlink()
    assert len(python_of(checkpoint_card(tmp_path))) == 1
    assert "trust_remote_code" not in checkpoint_card(tmp_path).text


def test_snippets_load_the_name_on_the_hub(tmp_path):
    saved(CASE["BertModel"], tmp_path)
    card = checkpoint_card(tmp_path, name="user/model")
    assert card.text.count('from_pretrained("user/model"') == 4
    assert "# model\n" in card.text
