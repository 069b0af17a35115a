"""What figures show. (That reports have them: `test_report.py`.)"""

import pandas as pd
import pytest

from hf_moa.analysis import plots


def titles(figure):
    return [axis.get_title() for axis in figure.axes if axis.get_title()]


@pytest.mark.parametrize(
    ("budgets", "shown"),
    [([1.0, 0.5], ["0.5", "1"]), (["1, 1", "1, 0.5"], ["1, 0.5", "1, 1"])],
    ids=["numbers", "pairs"],
)
def test_metrics_are_drawn_over_growing_budgets(budgets, shown):
    table = pd.DataFrame({"budget": budgets, "loss": [2.0, 3.0], "accuracy": [0.5, 0.25]})
    figure = plots.plot_budget_metrics(table)
    assert titles(figure) == ["loss", "accuracy"]
    for axis, metric in zip(figure.axes, ("loss", "accuracy"), strict=True):
        (line,) = axis.lines
        assert line.get_ydata().tolist() == table[metric][::-1].tolist()
        assert [label.get_text() for label in axis.get_xticklabels()] == shown


@pytest.mark.parametrize("draws", [1, 3])
def test_selections_are_drawn_with_their_deviations(draws):
    table = pd.DataFrame({"experts": ["mixture", "argmax", "random"], "loss": [1.0, 1.5, 3.0]})
    if draws > 1:  # as `expert_selection` has it
        table["loss std"] = [None, None, 0.25]
    figure = plots.plot_selection(table)
    assert titles(figure) == ["loss"]
    (container,) = figure.axes[0].containers
    points, _, bars = container
    assert points.get_xdata().tolist() == [1.0, 1.5, 3.0]
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == list(table["experts"])
    segments = [segment for bar in bars for segment in bar.get_segments() if len(segment)]
    assert [list(segment[:, 0]) for segment in segments] == ([[2.75, 3.25]] if draws > 1 else [])
