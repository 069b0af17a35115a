"""A checkpoint's own code with the oldest transformers that it works with, and with older ones."""

import os
import subprocess
import sys

import pytest
import torch
import transformers
from families import CASE, main_output

from hf_moa.modeling import checkpoint_code

MINIMUM = ".".join(map(str, checkpoint_code.MINIMUM))
_LOAD = """
import sys
import torch, transformers

folder, version = sys.argv[1:]
assert transformers.__version__ == version
for path, name, inputs, expected in torch.load(f"{folder}/expected.pt"):
    model = getattr(transformers, name).from_pretrained(path, trust_remote_code=True)
    output = model(**inputs)
    torch.testing.assert_close(output.logits, expected, atol=1e-4, rtol=1e-4)
    if model.can_generate():
        assert model.generate(inputs["input_ids"], max_new_tokens=3, do_sample=False).shape[0] == 3
"""


@pytest.mark.parametrize(
    ("version", "fits"),
    [("4.57.1", False), ("5.11.9", False), (f"{MINIMUM}.0.dev0", True), ("5.23.0", True)],
)
def test_code_says_at_once_what_it_needs(version, fits, tmp_path, monkeypatch):
    CASE["BertForMaskedLM"].build(attention_type="mae").save_pretrained(tmp_path)
    monkeypatch.setattr(transformers, "__version__", version)
    paths = list(tmp_path.glob("*_moa_bert.py"))
    assert len(paths) == 2
    for path in paths:
        text = path.read_text()
        check = text[: text.index(checkpoint_code._CHECK) + len(checkpoint_code._CHECK)]
        assert "from transformers" not in check
        if fits:
            exec(check, {})
            continue
        with pytest.raises(ImportError, match=rf"needs transformers {MINIMUM} or later \(got {version}"):
            exec(check, {})


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    rows = []
    for name in ("BertForMaskedLM", "GPT2LMHeadModel", "T5ForConditionalGeneration"):
        case = CASE[name]
        model = case.build(attention_type="mae", cct_budgets=[1, 0.5])
        model.save_pretrained(folder / name)
        with torch.no_grad():
            output = main_output(model(**case.inputs()))
        rows.append((str(folder / name), case.auto_name, case.inputs(), output))
    torch.save(rows, folder / "expected.pt")
    return folder


def load_with(version, checkpoints, folder):
    """Load them in a process that has this version of transformers, and what it needs."""
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-compile",
        "--target",
        str(folder),
    ]
    subprocess.run([*install, f"transformers=={version}"], check=True, capture_output=True)
    environment = os.environ | {"PYTHONPATH": str(folder), "HF_HOME": str(folder / "home")}
    command = [sys.executable, "-c", _LOAD, str(checkpoints), version]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_oldest_transformers_runs_the_code(checkpoints, tmp_path):
    done = load_with(f"{MINIMUM}.0", checkpoints, tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.nightly
def test_older_transformers_is_told_so(checkpoints, tmp_path):
    done = load_with("4.57.1", checkpoints, tmp_path)
    assert done.returncode != 0
    assert (
        f"ImportError: The code of this checkpoint needs transformers {MINIMUM} or later" in done.stderr
    )
