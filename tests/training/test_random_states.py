"""Generators that a block of code leaves as they were."""

import random

import numpy as np
import pytest
import torch

from hf_moa.training.random_states import kept_random_states


def draw():
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_draws_go_on_as_if_nothing_was_between():
    random.seed(0)
    np.random.seed(0)
    expected = [draw(), draw()]
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    actual = [draw()]
    with kept_random_states():
        draw()
        torch.manual_seed(5)
    with pytest.raises(KeyError):
        _fail_after_drawing()
    assert [*actual, draw()] == expected


@kept_random_states()
def _fail_after_drawing():
    draw()
    raise KeyError


@pytest.mark.gpu
def test_draws_of_a_device_go_on_too():
    torch.manual_seed(0)
    expected = [torch.rand(3, device="cuda") for _ in range(2)]
    torch.manual_seed(0)
    actual = [torch.rand(3, device="cuda")]
    with kept_random_states():
        torch.rand(5, device="cuda")
    actual.append(torch.rand(3, device="cuda"))
    assert torch.equal(torch.stack(actual), torch.stack(expected))
