"""Each example script is one file, which runs wherever it is copied to."""

import ast
import shutil
import sys
from pathlib import Path

import pytest
from launching import fresh_python

SCRIPTS = sorted((Path(__file__).parents[2] / "examples").glob("run_*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_imports_are_of_installed_packages(script):
    nodes = list(ast.walk(ast.parse(script.read_text(encoding="utf-8"))))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    packages = {name.partition(".")[0] for name in names}
    assert not packages & {path.stem for path in SCRIPTS}
    assert packages <= sys.stdlib_module_names | {
        "datasets",
        "hf_moa",
        "numpy",
        "peft",
        "torch",
        "transformers",
    }


HELP_OF_ALL = """
import runpy, sys
for script in sys.argv[1:]:
    sys.argv = [script, "--help"]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        assert not end.code, script
    print("=== ended:", script)
"""


@pytest.mark.slow
def test_copies_run(tmp_path):
    for script in SCRIPTS:
        shutil.copy(script, tmp_path)
    names = [script.name for script in SCRIPTS]
    done = fresh_python(HELP_OF_ALL, *names, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    *helps, _ = done.stdout.split("=== ended: ")
    assert len(helps) == len(SCRIPTS)
    assert all("--attention_type" in each for each in helps)
