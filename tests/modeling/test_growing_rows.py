"""Rows that grow in a cache, and the running mean of the last ones."""

import copy
import random

import pytest
import torch
from transformers.cache_utils import DynamicLayer

from hf_moa.modeling.cache.gate_states import CROP_RESERVE, GatedDynamicLayer
from hf_moa.modeling.cache.growing import AveragedEntries

RESERVE = 4  # rows held beyond the window


class Reference:
    """All rows, in float64."""

    def __init__(self, rows):
        self.rows = rows.double()

    def append(self, new):
        self.rows = torch.cat([self.rows, new.double()], dim=1)

    def mean(self, window):
        rows = self.rows if window is None else self.rows[:, -window:]
        return rows.mean(dim=1, keepdim=True)


def append_one(averaged, reference, window, dtype):
    new = torch.randn(averaged.entries.shape[0], 1, 6).to(dtype)
    held = None if window is None else window + RESERVE
    found = averaged.append_one(new, window=window, held=held)
    reference.append(new)
    return found


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("window", [1, 7, 17, 100, None])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-6)]
)
def test_mean_is_that_of_the_last_rows_whatever_happens_between(dtype, tolerance, window, mode):
    torch.manual_seed(0)
    choose = random.Random(0)
    start = torch.randn(3, 5, 6).to(dtype)
    averaged, reference = AveragedEntries(start), Reference(start)
    with mode():
        for _ in range(200):
            move = choose.choices(("one", "several", "crop", "reorder"), weights=(40, 1, 1, 1))[0]
            if move == "one":
                found = append_one(averaged, reference, window, dtype)
                expected = reference.mean(window)
                assert found.dtype == (torch.float64 if dtype is torch.float64 else torch.float32)
                torch.testing.assert_close(found.double(), expected, rtol=0, atol=tolerance)
            elif move == "several":
                new = torch.randn(3, 4, 6).to(dtype)
                averaged.append(new, held=None if window is None else window + RESERVE)
                reference.append(new)
            elif move == "crop":
                averaged.crop(2)
                reference.rows = reference.rows[:, :-2]
            else:
                order = torch.tensor([2, 0, 0])
                averaged.apply(lambda rows, order=order: rows[order])
                reference.rows = reference.rows[order]


def test_rounding_errors_do_not_add_up():
    """Rows of very different sizes: what a large one leaves behind is gone some steps later."""
    averaged, reference = AveragedEntries(torch.zeros(1, 1, 6)), Reference(torch.zeros(1, 1, 6))
    with torch.no_grad():
        for large in (1e6, 1.0):
            for _ in range(200):
                new = large * torch.randn(1, 1, 6)
                found = averaged.append_one(new, window=20, held=20 + RESERVE)
                reference.append(new)
    torch.testing.assert_close(found.double(), reference.mean(20), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", [3, 20, None])
def test_what_was_handed_out_stays(window):
    averaged, reference = AveragedEntries(torch.randn(2, 2, 6)), Reference(torch.zeros(2, 0, 6))
    with torch.no_grad():
        found = append_one(averaged, reference, window, torch.float32)
        before, other = found.clone(), copy.deepcopy(averaged)
        append_one(averaged, reference, window, torch.float32)
        assert torch.equal(found, before)
        new = torch.randn(2, 1, 6)
        mean = other.append_one(new, window=window, held=None)
        expected = other.entries if window is None else other.entries[:, -window:]
        torch.testing.assert_close(mean, expected.mean(dim=1, keepdim=True))


def layer_with(rows, valid=None):
    layer = GatedDynamicLayer.in_place_of(DynamicLayer())
    layer.window("x", rows, valid, size=5)
    return layer


def test_a_layer_averages_one_real_row_outside_of_graphs():
    rows, row = torch.randn(2, 9, 6), torch.randn(2, 1, 6)
    with torch.no_grad():
        layer = layer_with(rows)
        expected = torch.cat([rows, row], dim=1)[:, -5:].mean(dim=1, keepdim=True)
        torch.testing.assert_close(layer.mean("x", row, None, size=5), expected)
        assert len(layer.states["x"]) == 10
        assert layer.mean("y", row, None, size=5) is None, "the first row"
        assert layer.mean("x", rows, None, size=5) is None, "several"
        assert layer.mean("x", row, torch.tensor([[True], [False]]), size=5) is None, "no real one"
        padded = layer_with(rows, valid=torch.rand(2, 9) > 0.5)
        assert padded.mean("x", row, None, size=5) is None, "no real ones before"
    assert layer.mean("x", row, None, size=5) is None, "with a graph"
    assert len(layer.states["x"]) == 10


def test_a_layer_holds_the_window_and_its_reserve():
    with torch.no_grad():
        layer = layer_with(torch.randn(1, 2, 6))
        for _ in range(200):
            layer.mean("x", torch.randn(1, 1, 6), None, size=5)
    assert len(layer.states["x"]) == 4 + CROP_RESERVE
