"""Without the packages of the extras, what does not need them works, and what does names its extra."""

import subprocess
import sys

import pytest
from families import CASE
from test_pipelines import tokenizer

from hf_moa import upcycle
from hf_moa.extras import MissingExtraError, from_extra

EXTRAS = ("datasets", "evaluate", "sklearn", "scipy", "pandas", "matplotlib", "sacrebleu")
CORE = """
from hf_moa import FTGConfig, upcycle
from hf_moa.adapters import push_to_hub
from hf_moa.benchmark import benchmark
from hf_moa.model_card import checkpoint_card
from hf_moa.quickstart.run import run_quickstart
from hf_moa.training import MoaTrainer, evaluate_budgets
"""
NEEDS = {
    "from hf_moa.training import GlueMetric": ("datasets", "train"),
    "from hf_moa.training import load_glue_tsv": ("datasets", "train"),
    "from hf_moa.training.glue_metric import GlueMetric": ("datasets", "train"),
    "from hf_moa.analysis import analyze": ("pandas", "analysis"),
    "from hf_moa.analysis import MaeMeasure": ("pandas", "analysis"),
    "from hf_moa.text_batches import read_text": ("datasets", "analysis"),
}


def run(code, folder=None):
    blocked = f"import sys\nsys.modules.update(dict.fromkeys({EXTRAS}))\n"
    command = [sys.executable, "-c", blocked + code]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("extras")
    case = CASE["BertForSequenceClassification"]
    case.build_plain().save_pretrained(folder / "plain")
    upcycle(case.build_plain(), "mae").save_pretrained(folder / "gated")
    for name in ("plain", "gated"):
        tokenizer(case).save_pretrained(folder / name)
    (folder / "dev.tsv").write_text("text\tlabel\na head\t0\n")
    return folder


def test_core_needs_no_extra():
    done = run(CORE)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["upcycle", "plain", "out"],
        ["benchmark", "gated", "--turns", "2", "--length", "8"],
        ["card", "gated", "--output", "card.md"],
        ["env"],
        ["quickstart", "--max-steps", "2"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_commands_that_need_no_extra(arguments, checkpoint):
    done = run(f"from hf_moa_cli import main; sys.exit(main({arguments}))", checkpoint)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", ["analyze", "benchmark", "card"])
def test_commands_name_the_extra_in_a_line(command, checkpoint):
    arguments = [command, "gated", "--data", "dev.tsv"]
    if command == "card":
        arguments += ["--output", "measured.md"]
    done = run(f"from hf_moa_cli import main; sys.exit(main({arguments}))", checkpoint)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"hf-moa {command}: error: this needs the package ")
    assert line.endswith('pip install "hf-moa[analysis]"')


@pytest.mark.parametrize("code", NEEDS)
def test_message_names_the_extra(code):
    package, extra = NEEDS[code]
    done = run(code)
    last = done.stderr.splitlines()[-1]
    assert last.endswith(
        f'this needs the package {package}, which is missing: pip install "hf-moa[{extra}]"'
    )


def test_only_other_packages_are_of_an_extra():
    message = r'the package nowhere, which is missing: pip install "hf-moa\[train\]"'
    with pytest.raises(MissingExtraError, match=message), from_extra("train"):
        import nowhere  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match=r"hf_moa\.nowhere"), from_extra("train"):
        import hf_moa.nowhere  # noqa: F401
