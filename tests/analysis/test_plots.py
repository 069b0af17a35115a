"""What figures show. (That reports have them: `test_report.py`.)"""

import pandas as pd
import pytest

from hf_moa.analysis import plots
from hf_moa.modeling.routing.report import plot_pairs, plot_preferences

PARTS = ("encoder", "decoder", "cross")


def titles(figure):
    return [axis.get_title() for axis in figure.axes if axis.get_title()]


def pairs(lifts):
    """A table of two experts: (part, layer) -> lift."""
    rows = [
        {"part": part, "layer": layer, "expert": 0, "other": 1, "tokens": 9, "share": 0.1, "lift": lift}
        for (part, layer), lift in lifts.items()
    ]
    return pd.DataFrame(rows)


def colours(figure):
    """Of the pair of experts in each panel."""
    images = [axis.images[0] for axis in figure.axes if axis.images]
    return [image.cmap(image.norm(image.get_array()[0, 1])) for image in images]


def test_pairs_of_all_parts_are_drawn():
    figure = plot_pairs(pairs({(part, layer): 1.5 for part in PARTS for layer in range(2)}))
    assert titles(figure) == [f"{part}, layer {layer}" for part in PARTS for layer in range(2)]


def test_layers_are_spread_evenly_in_each_part():
    table = pairs({(part, layer): 1.0 for part in PARTS[:2] for layer in range(9)})
    assert titles(plot_pairs(table, most_layers=3)) == [
        f"{part}, layer {layer}" for part in PARTS[:2] for layer in (0, 4, 8)
    ]


def test_lifts_have_the_same_colours_beside_a_pair_of_rare_experts():
    usual = {("encoder", 0): 0.5, ("encoder", 1): 2.0, ("encoder", 2): 0.0}
    calm = colours(plot_pairs(pairs(usual)))
    assert colours(plot_pairs(pairs(usual | {("encoder", 3): 30.0})))[:3] == calm
    assert len(set(calm)) == 3


def test_chance_is_in_the_middle_of_the_scale():
    image = plot_pairs(pairs({("encoder", 0): 1.0})).axes[0].images[0]
    assert image.norm(1.0) == pytest.approx(0.5)
    assert image.norm(0.5) == pytest.approx(1 - image.norm(2.0))


def test_preferences_of_all_parts_are_drawn_with_their_own_tokens():
    tokens = {"encoder": ["a", "b"], "decoder": ["c", "d"], "cross": ["c", "d"]}
    rows = [
        {"part": part, "layer": 0, "token": token, "count": 4, "expert": expert, "share": 0.5}
        for part, names in tokens.items()
        for token in names
        for expert in range(2)  # as many as tokens
    ]
    figure = plot_preferences(pd.DataFrame(rows), rows="token")
    assert titles(figure) == [f"{part}, layer 0" for part in PARTS]
    shown = [[label.get_text() for label in axis.get_yticklabels()] for axis in figure.axes[:3]]
    assert shown == list(tokens.values())


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
