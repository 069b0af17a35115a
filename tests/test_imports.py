"""What `import hf_moa` brings, in whatever order it and the libraries it extends are imported."""

import ast
import itertools
import subprocess
import sys
from pathlib import Path

import pytest
from families import CASE
from peft import get_peft_model
from test_pipelines import tokenizer

import hf_moa
from hf_moa import FTGConfig

CHECKS = """
import hf_moa
from peft import AutoPeftModelForSequenceClassification, LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, pipeline

config = AutoConfig.from_pretrained("base")
model = AutoModelForSequenceClassification.from_pretrained("base")
assert type(config) is hf_moa.MoaBertConfig
assert type(model) is hf_moa.MoaBertForSequenceClassification
assert AutoTokenizer.from_pretrained("base")("a head").input_ids
assert pipeline("text-classification", model="base")("a head")[0]["label"]
get_peft_model(model, LoraConfig())
for adapted in (
    PeftModel.from_pretrained(AutoModelForSequenceClassification.from_pretrained("base"), "adapter"),
    AutoPeftModelForSequenceClassification.from_pretrained("adapter"),
):
    assert type(adapted.peft_config["default"]) is hf_moa.FTGConfig
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint in `base`, and in `adapter` an FTG adapter of it."""
    folder = tmp_path_factory.mktemp("imports")
    case = CASE["BertForSequenceClassification"]
    hf_moa.upcycle(case.build_plain(), "mae").save_pretrained(folder / "base")
    tokenizer(case).save_pretrained(folder / "base")
    model = hf_moa.MoaBertForSequenceClassification.from_pretrained(folder / "base")
    model = get_peft_model(model, FTGConfig(task_type="SEQ_CLS"))
    model.peft_config["default"].base_model_name_or_path = "base"
    model.save_pretrained(folder / "adapter")
    return folder


def run(code, folder):
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def marks(first):
    return pytest.mark.slow if first == "peft" else pytest.mark.nightly


@pytest.mark.parametrize(
    "order",
    [
        pytest.param(order, marks=[] if order == ("hf_moa", "transformers", "peft") else marks(order[0]))
        for order in itertools.permutations(["hf_moa", "transformers", "peft"])
    ],
    ids="-".join,
)
def test_every_order_registers(order, folder):
    run("\n".join(f"import {name}" for name in order) + CHECKS, folder)


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(first, marks=pytest.mark.slow)
        for first in (
            "from transformers import BertModel",
            "from transformers.utils import is_peft_available as has; import hf_moa; assert has()",
            "import hf_moa_cli, peft; from hf_moa import MoaBertConfig",
        )
    ]
    + [
        pytest.param(first, marks=pytest.mark.nightly)
        for first in (
            "import torch, hf_moa",
            "import hf_moa; from transformers import Trainer",
            "import accelerate",
            "import hf_moa, accelerate",
            "from peft import PeftModel",
            "import hf_moa.modeling.ftg.config",
            "from hf_moa.adapters import FTGConfig",
            "from hf_moa import *",
            "import hf_moa.upcycle",
            "import hf_moa_cli; from hf_moa import upcycle",
        )
    ],
)
def test_every_way_to_import_registers(first, folder):
    run(first + CHECKS + "assert callable(hf_moa.upcycle)", folder)


def test_names_are_there():
    (typed,) = (
        node
        for node in ast.parse(Path(hf_moa.__file__).read_text()).body
        if type(node) is ast.If and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    assert sorted(alias.name for node in typed.body for alias in node.names) == sorted(hf_moa.__all__)
    for name in hf_moa.__all__:
        assert getattr(hf_moa, name).__name__ == name
    assert set(hf_moa.__all__) <= set(dir(hf_moa))
    with pytest.raises(AttributeError, match="'hf_moa' has no attribute 'MoaBertForNothing'"):
        hf_moa.MoaBertForNothing  # noqa: B018


def test_what_is_not_needed_is_not_imported(tmp_path):
    code = "import sys, hf_moa; hf_moa.MoaBertForSequenceClassification; print(*sys.modules)"
    imported = run(code, tmp_path).split()
    assert "torch" in imported
    assert not {"peft", "datasets", "evaluate", "pandas", "matplotlib"} & set(imported)


@pytest.mark.slow
def test_console_command_reads_checkpoints(folder):
    commands = [
        arguments
        for checkpoint in ("base", "adapter")
        for arguments in (
            ["card", checkpoint, "--output", f"{checkpoint}.md"],
            ["benchmark", checkpoint, "--turns", "2", "--length", "8"],
        )
    ]
    code = f"from hf_moa_cli import main\nfor each in {commands}: print(each, main(each))"
    printed = run(code, folder).splitlines()
    for arguments in commands:
        assert f"{arguments} 0" in printed
