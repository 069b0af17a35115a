"""The experiments of `examples/reproduce`: runs that can be stopped, and their reports."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launching import launch_ranks

FOLDER = Path(__file__).parents[2] / "examples" / "reproduce"


@pytest.fixture
def experiment(fresh_import, monkeypatch):
    adapters = fresh_import(FOLDER)("adapters")
    monkeypatch.setattr(adapters, "SEEDS", (1,))
    monkeypatch.setattr(adapters, "FRACTIONS", (0.5, 1.0))
    monkeypatch.setattr(adapters, "EVALUATIONS", 1)
    methods = {"ftg": ("FTG", (1e-3, 1e-2)), "head": ("head alone", (1e-3,))}
    monkeypatch.setattr(adapters, "METHODS", methods)
    task = {"examples": 24, "batch": 4, "epochs": 1, "least_steps": 1}
    monkeypatch.setattr(adapters, "TASKS", {"mrpc": task})
    return adapters


def test_runs_are_made_once_and_reported(
    experiment,
    checkpoint,
    glue_dir,
    tmp_path,
    capsys,
):
    results = tmp_path / "results.jsonl"
    argv = ["--model_name_or_path", checkpoint, "--data_dir", glue_dir, "--results", str(results)]
    experiment.EXPERIMENT.main(argv)
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    assert len(rows) == 3 + 4  # learning rates; methods times fractions
    assert {row["settings"]["fraction"] for row in rows} == {0.25, 0.5, 1.0}
    for row in rows:
        assert 0 <= row["measured"]["accuracy"] <= 1
        assert row["measured"]["steps_to_best"] >= 1
    sizes = {r["settings"]["method"]: r["measured"]["trainable_parameters"] for r in rows}
    assert sizes["head"] < sizes["ftg"]

    # A run that was cut off goes on where it was.
    lines = results.read_text().splitlines(keepends=True)
    results.write_text("".join(lines[:-1]))
    experiment.EXPERIMENT.main(argv)
    again = results.read_text().splitlines(keepends=True)
    assert again[:-1] == lines[:-1]
    assert json.loads(again[-1])["settings"] == json.loads(lines[-1])["settings"]
    assert json.loads(again[-1])["measured"]["curve"] == json.loads(lines[-1])["measured"]["curve"]

    capsys.readouterr()
    experiment.EXPERIMENT.main(["--report", str(tmp_path / "report"), "--results", str(results)])
    text = capsys.readouterr().out
    assert "| FTG |" in text
    assert (tmp_path / "report" / "accuracy.svg").is_file()


@pytest.mark.nightly
def test_mixtures_over_two_processes(tmp_path):
    """A process holds half of the experts, and loads no more."""
    (tmp_path / "train.txt").write_text("a gate chooses some heads\n" * 1000)
    arguments = ("--train_file", tmp_path / "train.txt", "--results", tmp_path / "results.jsonl")
    launch_ranks(2, FOLDER / "split_mixtures.py", *arguments, "--steps", 1, "--batch_size", 1)
    rows = [json.loads(line)["measured"] for line in (tmp_path / "results.jsonl").open()]
    assert len(rows) == 4
    for row in rows:
        assert max(row["bytes_of_process"]) < 0.6 * row["bytes_of_model"]
        assert all(sum(layer) == pytest.approx(1) for layer in row["load_of_processes"])
    for row in rows[:2]:  # of the large one
        assert max(row["peak_of_loading"]) < 0.8 * row["bytes_of_model"]


@pytest.mark.nightly
def test_half_of_a_mixture_on_disk():
    script = [sys.executable, FOLDER / "split_mixtures.py", "--device_map"]
    done = subprocess.run(script, capture_output=True, text=True, check=True)
    large = next(line for line in done.stdout.splitlines() if line.startswith("2 of 1,024"))
    numbers = re.findall(r"[\d,]{6,}", large)
    total, held, peak = (int(number.replace(",", "")) for number in numbers)
    assert held < 0.6 * total
    assert peak < 0.6 * total


def test_report_of_a_run_under_way(experiment, tmp_path, capsys):
    experiment.EXPERIMENT.main(["--report", str(tmp_path), "--results", str(tmp_path / "none.jsonl")])
    assert "| method |" in capsys.readouterr().out


def test_report_leaves_out_other_learning_rates(experiment, tmp_path):
    """Those of runs that were made before a better rate was tried."""
    from runs import Results

    results = Results(tmp_path / "results.jsonl")
    run = {"task": "mrpc", "method": "ftg"}
    for rate, accuracy in ((1e-3, 0.6), (1e-2, 0.7)):
        for fraction, seed in ((0.25, 0), (0.5, 1)):
            settings = {**run, "learning_rate": rate, "fraction": fraction, "seed": seed}
            results.add(settings, {"accuracy": accuracy}, seconds=1)
    assert experiment.reported(results, "accuracy", "mrpc", "ftg", 0.5) == {1: 0.7}
    assert experiment.accuracy(results, "mrpc", "ftg", 0.5) == [70]
    results.add(
        {**run, "method": "none", "learning_rate": 1e-4, "fraction": 0.25, "seed": 0},
        {"accuracy": 0.5},
        seconds=1,
    )
    results.add(
        {**run, "method": "none", "learning_rate": 1e-4, "fraction": 0.5, "seed": 1},
        {"accuracy": 0.9},
        seconds=1,
    )
    (difference,) = experiment.above_full_finetuning(results, "mrpc", "ftg", 0.5)
    assert difference == pytest.approx(-20)
    assert experiment.above_full_finetuning(results, "mrpc", "none", 0.5) == []
