"""Each example script is one file, which runs wherever it is copied to."""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


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


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_copy_runs(script, tmp_path):
    shutil.copy(script, tmp_path)
    command = [sys.executable, "-P", script.name, "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--attention_type" in done.stdout
