"""Block coordinate descent for MAE (Peng et al. 2020, section 3.2): gates and experts in turn.

A G step updates only the gates, on the mixture, by plain SGD; an F step updates everything else,
each sequence through one expert that its gates draw. G steps are taken in every n-th epoch, each
before the F step on the same accumulated batch:

    descent = BlockCoordinateDescent(model)
    for epoch in range(num_epochs):
        for batches in accumulated_batches:  # the micro-batches of one update
            if descent.has_gate_steps(epoch):
                descent.gate_step(backward, batches)
            for batch in batches:  # F step, as in any training loop
                ...
            optimizer.step()  # made without the gates: `other_parameters(model)`
    descent.finish()
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn

from hf_moa.gated_models import is_instance_by_name
from hf_moa.modeling.core.process_sum import in_process_group
from hf_moa.modeling.core.sharding import DTensor
from hf_moa.modeling.mae.mixture import MaeGate

from .parameter_groups import check_learning_rate

if TYPE_CHECKING:
    from hf_moa.gated_models import GatedPreTrainedModel

MAE_TRAININGS = ("bcd", "expert", "joint")
GATE_LEARNING_RATE = 1.0  # of the gates' SGD, where none is given


def gate_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of the model's MAE gates that can learn."""
    return [
        parameter
        for module in model.modules()
        if is_instance_by_name(module, MaeGate)
        for parameter in module.parameters()
        if parameter.requires_grad
    ]


def other_parameters(model: nn.Module) -> list[nn.Parameter]:
    """All other parameters of the model that can learn."""
    gates = {id(parameter) for parameter in gate_parameters(model)}
    return [p for p in model.parameters() if p.requires_grad and id(p) not in gates]


def prepare_gates(
    model: nn.Module, args: Any, mae_training: str | None
) -> BlockCoordinateDescent | None:
    """Ready a model's gates for a run: statistics over processes, and block coordinate descent.

    Args:
        model: as for `BlockCoordinateDescent`, or one without gates.
        args: `GateTrainingArguments`.
        mae_training: how the gates are trained; None without MAE attention.

    Returns:
        The descent of "bcd" and "expert".
    """
    set_global_statistics = getattr(model, "set_global_statistics", None)
    if set_global_statistics is not None:
        set_global_statistics(gate_norm=args.sync_gate_norm, router_balance=args.router_global_balance)
    if mae_training not in ("bcd", "expert"):
        return None
    return BlockCoordinateDescent(
        model,
        learning_rate=args.descent_learning_rate,
        gate_every_n_epochs=args.gate_every_n_epochs if mae_training == "bcd" else None,
    )


def keep_gates_out(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Take the gates' parameters out of an optimiser that was made for the whole model."""
    gates = {id(parameter) for parameter in gate_parameters(model)}
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if id(p) not in gates]
    for parameter in [p for p in optimizer.state if id(p) in gates]:
        del optimizer.state[parameter]


class NonFiniteGradientError(ArithmeticError):
    """The gates' gradients are infinite or no numbers; the gates were left as they were."""


class BlockCoordinateDescent:
    """The G steps of an MAE model, and the phase between them.

    From construction to `finish` the model is in the phase "expert" (F steps).

    Args:
        model: the model, as FSDP has sharded it if it does, but without a DDP wrapper.
        learning_rate: of the gates' SGD, constant: no momentum, weight decay or schedule.
        gate_every_n_epochs: n: epochs 0, n, 2n, ... have G steps. None: no epoch has, as for uniform
            gates (UNI-MAE), which have nothing to learn.

    Raises:
        ValueError: the model has no MAE attention, or no gates that can learn (unless
            `gate_every_n_epochs` is None); a rate or number of epochs that is none.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        learning_rate: float = GATE_LEARNING_RATE,
        gate_every_n_epochs: int | None = 5,
    ):
        check_learning_rate("gate_learning_rate", learning_rate)
        self.model = cast("GatedPreTrainedModel", model)
        self.gate_every_n_epochs = gate_every_n_epochs
        self.optimizer: torch.optim.SGD | None = None
        self._before: list[torch.Tensor] | None = None  # the gates, before their last step
        if gate_every_n_epochs is not None:
            check_gate_every_n_epochs(gate_every_n_epochs)
            self.model.set_mae_phase("gate")  # which knows what it needs
            self.optimizer = torch.optim.SGD(gate_parameters(model), lr=learning_rate)
        self.model.set_mae_phase("expert")

    def has_gate_steps(self, epoch: int) -> bool:
        """Whether the batches of this epoch (from 0) take a G step before their F step."""
        return self.gate_every_n_epochs is not None and epoch % self.gate_every_n_epochs == 0

    def gate_step(
        self, backward: Callable[[Any], Any], batches: Iterable[Any], *, scaler: Any = None
    ) -> None:
        """Update the gates on the micro-batches of one accumulated batch.

        Under DDP, `backward` calls the model inside the wrapper: the gates' gradients are averaged
        over the processes here, in one exchange, and no others are.

        Args:
            backward: runs the model forward and backward on one micro-batch, its loss divided as the
                accumulated batch asks for.
            batches: the micro-batches.
            scaler: the `GradScaler` that `backward` scaled the loss with, if any.

        Raises:
            NonFiniteGradientError: the gradients are not finite (and no scaler takes care of that).
            RuntimeError: a gate got no gradient.
        """
        self._before = None
        optimizer = cast(torch.optim.SGD, self.optimizer)  # it has one where epochs have G steps
        optimizer.zero_grad()
        self.model.set_mae_phase("gate")
        try:
            for batch in batches:
                backward(batch)
        finally:
            self.model.set_mae_phase("expert")
        parameters = optimizer.param_groups[0]["params"]
        missing = sum(p.grad is None for p in parameters)
        if missing:
            raise RuntimeError(
                f"{missing} of the gates' {len(parameters)} parameters got no gradient in a G step: "
                "`backward` must run the model on every batch, and reduce what is sharded."
            )
        _average_over_processes(parameters)
        before = [p.detach().clone() for p in parameters]
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        else:
            norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
            norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
            if not bool(norm.isfinite()):
                optimizer.zero_grad()  # or they stay: no other optimiser has the gates
                raise NonFiniteGradientError(f"The norm of the gates' gradients is {float(norm)}.")
            optimizer.step()
        optimizer.zero_grad()
        self._before = before

    def forget_gate_step(self) -> None:
        """Another update begins, without a G step: there is none to take back."""
        self._before = None

    @torch.no_grad()
    def take_gate_step_back(self) -> None:
        """Put the gates back to where they were before the G step of this update, if it had one."""
        if self._before is None or self.optimizer is None:
            return
        parameters = self.optimizer.param_groups[0]["params"]
        for parameter, before in zip(parameters, self._before, strict=True):
            parameter.copy_(before)
        self._before = None

    def finish(self) -> None:
        """Leave the model in the phase "mixture"."""
        self.model.set_mae_phase("mixture")


def check_gate_every_n_epochs(value: Any) -> None:
    """Raise a ValueError unless it is an integer of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"gate_every_n_epochs must be an integer of at least 1 (got {value!r}).")


@torch.no_grad()
def _average_over_processes(parameters: list[nn.Parameter]) -> None:
    """Average the gradients over the processes, of parameters that each process has whole."""
    found = [p.grad for p in parameters]
    gradients = [grad for grad in found if grad is not None and not isinstance(grad, DTensor)]
    if not gradients or not in_process_group():
        return
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    parts = flat.split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))
