"""Accelerate's settings, which last as long as a process."""

import pytest
from accelerate.state import AcceleratorState, GradientState, PartialState


def forget_accelerator():
    """As in the new process that a script has."""
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()


@pytest.fixture
def fresh_accelerator():
    forget_accelerator()
    yield
    forget_accelerator()
