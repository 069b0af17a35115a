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


@pytest.mark.slow
def test_commands_that_need_no_extra(checkpoint):
    commands = [
        ["upcycle", "plain", "out"],
        ["benchmark", "gated", "--turns", "2", "--length", "8"],
        ["card", "gated", "--output", "card.md"],
        ["env"],
        ["quickstart", "--max-steps", "2"],
    ]
    done = run(f"from hf_moa_cli import main\nprint([main(each) for each in {commands}])", checkpoint)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str([0] * len(commands))


def test_commands_name_the_extra_in_a_line(checkpoint):
    names = ("analyze", "benchmark", "card")
    commands = [[name, "gated", "--data", "dev.tsv"] for name in names]
    commands[-1] += ["--output", "measured.md"]
    done = run(f"from hf_moa_cli import main\nprint([main(each) for each in {commands}])", checkpoint)
    assert done.stdout.splitlines() == ["[2, 2, 2]"], done.stderr
    for name, line in zip(names, done.stderr.splitlines(), strict=True):
        assert line.startswith(f"hf-moa {name}: error: this needs the package ")
        assert line.endswith('pip install "hf-moa[analysis]"')


def test_core_needs_no_extra_and_messages_name_it():
    done = run(
        CORE + f"for code in {list(NEEDS)}:\n"
        "    try: exec(code)\n"
        "    except ImportError as error: print(error)\n"
        "    else: print('no error')"
    )
    assert done.returncode == 0, done.stderr
    for line, (package, extra) in zip(done.stdout.splitlines(), NEEDS.values(), strict=True):
        assert line.endswith(
            f'this needs the package {package}, which is missing: pip install "hf-moa[{extra}]"'
        )


def test_only_other_packages_are_of_an_extra():
    message = r'the package nowhere, which is missing: pip install "hf-moa\[train\]"'
    with pytest.raises(MissingExtraError, match=message), from_extra("train"):
        import nowhere  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match=r"hf_moa\.nowhere"), from_extra("train"):
        import hf_moa.nowhere  # noqa: F401
