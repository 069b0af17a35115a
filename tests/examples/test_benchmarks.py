"""The benchmark script runs, and writes what it says. (Its figures are for those who run it.)"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "benchmarks"


def test_compare_reports_ratios_to_the_first(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import timing

    clock = iter(range(10_000))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: float(next(clock)))
    calls = []

    def slow():
        calls.append("slow")
        for _ in range(2):  # two more seconds of the clock
            next(clock)

    first, second = timing.compare({"fast": lambda: None, "slow": slow}, turns=5)
    assert (first.name, first.ratio, first.milliseconds) == ("fast", 1.0, 1000.0)
    assert (second.name, second.ratio, second.milliseconds) == ("slow", 3.0, 3000.0)
    assert len(calls) == 3 + 5


@pytest.mark.slow
def test_script_writes_tables_and_a_picture(tmp_path):
    command = [sys.executable, str(FOLDER / "run.py"), "moa", "--turns", "2"]
    done = subprocess.run(
        [*command, "--output_dir", str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert "| MoA, N=64 |" in done.stdout
    data = json.loads((tmp_path / "results.json").read_text())
    assert data["environment"]["threads"].startswith("1 of")
    assert [t["timings"][0]["ratio"] for t in data["tables"]] == [1.0] * 4
    assert (tmp_path / "results.md").read_text().startswith("processor")
    assert (tmp_path / "ratios.svg").is_file()


def test_unknown_benchmark_is_an_error(tmp_path):
    command = [sys.executable, str(FOLDER / "run.py"), "speed"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "must be of mae, moa, cct" in done.stderr
