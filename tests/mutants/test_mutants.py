"""The list of mutants fits today's code; with `-m mutants`, each of them is killed."""

import ast
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


@pytest.mark.mutants
def test_every_mutant_is_killed():
    run = subprocess.run([sys.executable, HERE / "run.py"], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
