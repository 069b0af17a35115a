"""The figures of `examples/reproduce`: what is drawn where."""

from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "reproduce"
PERPLEXITIES = {("plain", 1): 20.0, ("plain", 2): 24.0, ("gated", 1): 21.0}
STEPS = (10, 20)  # a longer run's perplexity is that much higher


@pytest.fixture
def figures(fresh_import):
    return fresh_import(FOLDER)("figures")


@pytest.fixture
def draw(figures, tmp_path):
    """path -> draws two panels of three variants, one of which has no run."""
    results = figures.Results(tmp_path / "results.jsonl")
    for (variant, seed), perplexity in PERPLEXITIES.items():
        for steps in STEPS:
            settings = {"variant": variant, "seed": seed, "steps": steps}
            results.add(settings, {"perplexity": perplexity + steps}, seconds=1.0)
    column = figures.Column("half the perplexity", "perplexity", scale=0.5)
    measures = [figures.Panel(column, f"{steps} updates", {"steps": steps}) for steps in STEPS]
    return lambda path: figures.draw_variants(results, ["plain", "gated", "none"], measures, path)


def test_every_seed_is_a_dot_and_the_mean_a_stroke(figures, draw, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(figures, "save", lambda figure, axes, path: drawn.extend(axes))
    draw(tmp_path / "not_written.svg")
    for axis, steps in zip(drawn, STEPS, strict=True):
        assert axis.get_title() == f"{steps} updates"
        assert axis.get_xlabel() == "half the perplexity"
        lines = [(*map(list, line.get_data()), line.get_marker()) for line in axis.get_lines()]
        half = steps / 2
        assert lines == [
            ([10 + half, 12 + half], [0, 0], "o"),
            ([11 + half], [0], "|"),
            ([10.5 + half], [1], "o"),
            ([10.5 + half], [1], "|"),
            ([], [], "o"),
        ]
    assert [label.get_text() for label in drawn[0].get_yticklabels()] == ["plain", "gated", "none"]
    low, high = drawn[0].get_ylim()
    assert low > 2 > 0 > high  # the first variant on top


def test_the_same_lines_give_the_same_file(draw, tmp_path):
    first, second = tmp_path / "1" / "dots.svg", tmp_path / "2" / "dots.svg"
    draw(first)
    draw(second)
    assert first.read_bytes() == second.read_bytes()
    assert first.read_bytes().startswith(b"<?xml")
