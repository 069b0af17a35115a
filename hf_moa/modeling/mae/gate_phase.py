"""The G step of MAE's block coordinate descent: a forward in which only the gates can learn.

The parameters of everything else stand in the graph detached, so that their gradients are neither
computed nor stored, while `requires_grad` keeps its value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps

from torch import Tensor, nn


def only_gates_learn_in_gate_phase(forward: Callable) -> Callable:
    """Decorate the `forward` of a module that has a `mae_phase`.

    Models and their checkpointed layers both carry it: what gradient checkpointing recomputes during
    backward then has the same graph as the first forward.
    """

    @wraps(forward)
    def wrapper(self, *args, **kwargs):
        if self.mae_phase != "gate" or not self.training:
            return forward(self, *args, **kwargs)
        with detached_parameters(self):
            return forward(self, *args, **kwargs)

    return wrapper


@contextmanager
def detached_parameters(module: nn.Module) -> Iterator[None]:
    """Replace every parameter outside `MaeGate`s by its detached self, for the duration."""
    replaced: list[tuple[dict, str, Tensor]] = []
    try:
        for owner in _modules_outside_gates(module):
            held, names = _parameters_of(owner)
            for name in names:
                parameter = held[name]
                if parameter is not None and parameter.requires_grad:
                    replaced.append((held, name, parameter))
                    held[name] = parameter.detach()
        yield
    finally:
        for held, name, parameter in replaced:
            held[name] = parameter


def _parameters_of(module: nn.Module) -> tuple[dict, list[str]]:
    """The dictionary that holds the module's own parameters, and their names in it."""
    if getattr(module, "_is_replica", False):  # nn.DataParallel's have them as plain attributes
        held = module.__dict__
        return held, list(held["_former_parameters"])
    return module._parameters, list(module._parameters)


def _modules_outside_gates(module: nn.Module) -> Iterator[nn.Module]:
    if getattr(module, "gate_kind", None) == "mae":
        return
    yield module
    for child in module.children():
        yield from _modules_outside_gates(child)
