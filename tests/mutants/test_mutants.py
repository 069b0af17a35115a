"""The list of mutants fits today's code; with `-m mutants`, each of them is killed."""

import ast
import importlib.util
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from mutants import MUTANTS, PACKAGE

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_another_program(mutant):
    source = (ROOT / PACKAGE / mutant.file).read_text()
    mutated = mutant.apply(source)  # which refuses a text that does not occur once
    assert ast.dump(ast.parse(mutated)) != ast.dump(ast.parse(source))
    assert mutant.fault
    assert mutant.tests
    for test in mutant.tests:
        assert (ROOT / "tests" / test).is_file()


def test_names_are_unique():
    counts = Counter(mutant.name for mutant in MUTANTS)
    assert max(counts.values()) == 1
    assert len(counts) >= 40


# --- the script -----------------------------------------------------------------------------------

MUTANT = MUTANTS[0]
SOURCE = (ROOT / PACKAGE / MUTANT.file).read_text()
FAILED = (1, "FAILED tests/test_a.py::test_b[1-2 - 3] - AssertionError: 1 - 2")


class FakePytest:
    """Gives answers instead of running tests, and notes the file that they would run with."""

    def __init__(self, *answers):
        self.answers, self.sources, self.selections = list(answers), [], []

    def __call__(self, copy, selection, timeout):
        self.sources.append((copy / PACKAGE / MUTANT.file).read_text())
        self.selections.append(selection)
        return self.answers.pop(0)


@pytest.fixture
def run(monkeypatch, tmp_path):
    spec = importlib.util.spec_from_file_location("run_mutants", HERE / "run.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)

    def copy(folder):
        file = folder / PACKAGE / MUTANT.file
        file.parent.mkdir(parents=True)
        file.write_text(SOURCE)
        return folder

    def main(pytest, *arguments):
        monkeypatch.setattr(script, "_pytest", pytest)
        return script.main([MUTANT.name, "--output", str(tmp_path / "found.json"), *arguments])

    monkeypatch.setattr(script, "_copy", copy)
    return main


def found(folder):
    (result,) = json.loads((folder / "found.json").read_text())
    return result


def test_a_mutant_is_killed_by_a_test_that_passes_without_it(run, tmp_path, capsys):
    pytest = FakePytest(FAILED, (0, ""))
    assert run(pytest) == 0
    assert pytest.sources == [MUTANT.apply(SOURCE), SOURCE]
    test = "tests/test_a.py::test_b[1-2 - 3]"
    assert pytest.selections[1] == [test]
    assert found(tmp_path)["killed_by"] == test
    assert f"| {MUTANT.name} | `{test}` |" in capsys.readouterr().out
    assert run(FakePytest()) == 0  # what was killed is not run again


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        ([(0, "1 passed")], "survived"),
        ([FAILED, (1, "")], "fails without it"),
        ([(2, "ERROR tests/test_a.py")], "ended with 2"),
        ([(5, "no tests ran")], "ended with 5"),
        ([("timeout", "")], "ended with timeout"),
    ],
    ids=("passes", "fails-anyway", "collection-error", "no-tests", "timeout"),
)
def test_a_mutant_that_no_test_kills_is_told(run, tmp_path, capsys, answers, why):
    assert run(FakePytest(*answers)) == 1
    assert found(tmp_path)["killed_by"] is None
    assert why in found(tmp_path)["why_not"]
    assert f"- {MUTANT.name}" in capsys.readouterr().out
    assert run(FakePytest(FAILED, (0, ""))) == 0  # run again, as after a test was written
    assert found(tmp_path)["killed_by"]


def test_names_that_are_none_are_refused(run, capsys):
    with pytest.raises(SystemExit):
        run(FakePytest(), "no-such-mutant")
    assert "no-such-mutant" in capsys.readouterr().err


@pytest.mark.mutants
def test_every_mutant_is_killed():
    run = subprocess.run([sys.executable, HERE / "run.py"], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
