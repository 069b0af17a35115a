"""Floating-point operations of a model's forward, counted without computing anything.

Counted are the matrix products of the equations, 2 operations for each multiply-accumulate: projections,
scores and weighted values of the keys that a query sees, gates, heads. Norms, activations, softmax,
embeddings and the pooling of gate inputs are not, as usual.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from .gated_models import is_instance_by_name
from .modeling.attention.flow import AttentionFlow
from .modeling.core.budgets import BudgetHolder
from .modeling.core.macs import Macs

if TYPE_CHECKING:
    from .gated_models import GatedPreTrainedModel


@dataclass(frozen=True)
class PartFlops:
    """Operations of one part of a model on one sequence.

    Attributes:
        name: the layer (`"encoder.layer.0"`), or the module where it is in none.
        part: `"self_attention"`, `"cross_attention"`, `"feed_forward"`, or `"head"` outside layers.
        total: with the matrices of every expert applied to every token (attention itself has the heads
            that are chosen), and all of CCT's gates open.
        active: of the experts that the routers choose, at the budget.
        gating: what of `active` gates, routers and control networks take.
    """

    name: str
    part: str
    total: float
    active: float
    gating: float


@dataclass(frozen=True)
class Flops:
    """Operations of a model's forward on one sequence.

    Attributes:
        parts: of each layer's sub-layers, in the order of computation.
        num_tokens: of the sequence; encoder-decoder models: of both.
        budget: that CCT holds a layer's skippable part to, in a pair for encoder-decoder models; None
            without CCT.
    """

    parts: tuple[PartFlops, ...]
    num_tokens: int
    budget: Any

    @property
    def total(self) -> float:
        return sum(part.total for part in self.parts)

    @property
    def active(self) -> float:
        return sum(part.active for part in self.parts)

    @property
    def gating(self) -> float:
        return sum(part.gating for part in self.parts)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON or a `DataFrame` of `["parts"]`."""
        sums = {"total": self.total, "active": self.active, "gating": self.gating}
        return {**asdict(self), "parts": [asdict(part) for part in self.parts], **sums}

    def __str__(self) -> str:
        """A Markdown table of millions of operations per token."""
        rows = [(part.name, part.part, part) for part in self.parts] + [("sum", "", self)]
        lines = [
            "| layer | part | total, MFLOPs/token | active | of it gating |",
            "|---|---|---|---|---|",
        ]
        for name, part, flops in rows:
            numbers = (flops.total, flops.active, flops.gating)
            cells = (f"{number / self.num_tokens / 1e6:.4g}" for number in numbers)
            lines.append(f"| {name} | {part} | {' | '.join(cells)} |")
        return "\n".join(lines)


def count_flops(model: nn.Module, *lengths: int, budget: Any = None) -> Flops:
    """Count what a call of the model on one sequence computes; see `GatedModel.flops`.

    The model runs on the meta device, which keeps shapes and has no numbers.
    """
    places = dict(_places(model))
    controls = {
        stack: control
        for stack in model.modules()
        for control in stack.children()
        if is_instance_by_name(control, BudgetHolder)
    }
    holders = {module: control for stack, control in controls.items() for module in stack.modules()}
    shares = {control: control.share(budget) for control in controls.values()}
    gating = {
        inner
        for module in model.modules()
        if getattr(module, "gate_kind", None) is not None
        for inner in module.modules()
    }
    sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    tokens = [torch.zeros(1, length, dtype=torch.long, device="meta") for length in lengths]

    def count(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        macs = _macs(module, *args, **kwargs)
        if macs is None:
            return
        active = macs.active - skipped(macs, module)
        numbers = (macs.total, active, macs.active if module in gating else 0)
        sums[places[module]] = [
            sum_ + 2 * number for sum_, number in zip(sums[places[module]], numbers, strict=True)
        ]

    def skipped(macs: Macs, module: nn.Module) -> float:
        holder: Any = holders.get(module)
        layer, part = places[module]
        if holder is None or part == "head":
            return 0
        skippable = macs.active if holder.skips_whole_parts else macs.skippable
        if not skippable:
            return 0
        number, part = int(layer.rsplit(".", 1)[-1]), "gate" if module in gating else part
        return skippable * (1 - holder.share_of(shares[holder], layer=number, part=part))

    hooks = [module.register_forward_hook(count, with_kwargs=True) for module in model.modules()]
    gated = cast("GatedPreTrainedModel", model)
    try:
        with _on_meta(model), _at_budget(model, controls.values(), budget), torch.no_grad():
            gated._run_to_count(*tokens)
            fewer: list[Any] = [
                control for control, share in shares.items() if not control.has_all_layers(share)
            ]
            if fewer:  # another layer is the last, which may compute less
                of_all, sums = sums, defaultdict(lambda: [0.0, 0.0, 0.0])
                with ExitStack() as stack:
                    for control in fewer:
                        stack.enter_context(control.of_whole_layers(shares[control]))
                    gated._run_to_count(*tokens)
                sums = {place: [whole[0], *sums[place][1:]] for place, whole in of_all.items()}
    finally:
        for hook in hooks:
            hook.remove()
    parts = (PartFlops(*place, *numbers) for place, numbers in sums.items())
    budgets = tuple(shares.values())
    return Flops(tuple(parts), sum(lengths), (budgets or (None,))[0] if len(budgets) < 2 else budgets)


def _macs(module: nn.Module, x: Any = None, *args: Any, **kwargs: Any) -> Any:
    """The `Macs` of one call of a module itself; None where it has nothing to multiply."""
    if isinstance(module, (nn.Linear, Conv1D)):
        macs = x.numel() // x.shape[-1] * module.weight.numel()
        return Macs(macs, macs)
    count_macs = getattr(module, "count_macs", None)
    return None if count_macs is None else count_macs(x, *args, **kwargs)


def _places(model: nn.Module) -> Iterator[tuple[nn.Module, tuple[str, str]]]:
    """Every module and where it belongs: `PartFlops.name` and `part`."""
    modules = dict(model.named_modules())
    for name, module in modules.items():
        parents = [name.rsplit(".", n)[0] for n in range(name.count("."), -1, -1)]
        layers = [p for p in parents if isinstance(modules[p], GradientCheckpointingLayer)]
        if not layers:
            yield module, (name, "head")
            continue
        layer, part = layers[0], "feed_forward"
        for parent in parents[parents.index(layer) + 1 :]:
            if isinstance(modules[parent], nn.ModuleList):  # T5's of a layer's parts
                continue
            for inner in modules[parent].modules():
                if is_instance_by_name(inner, AttentionFlow):
                    part = "cross_attention" if inner.is_cross_attention else "self_attention"
            break
        yield module, (layer, part)


def _tensors(module: nn.Module) -> tuple[dict[str, Tensor | None], ...]:
    """A module's own parameters and buffers, by name."""
    return cast("tuple[dict[str, Tensor | None], ...]", (module._parameters, module._buffers))


@contextmanager
def _at_budget(model: nn.Module, controls: Iterable[Any], budget: Any) -> Iterator[None]:
    """Have the model at a budget; but not at one that leaves out whole parts of matrices: those are
    counted, and their share subtracted."""
    lists = [vars(m)["budgets"] for m in model.modules() if hasattr(vars(m).get("budgets"), "chosen")]
    before = [each.chosen for each in lists]
    try:
        if any(control.skips_whole_parts for control in controls):
            for each in lists:
                each.chosen = None
        elif budget is not None:
            cast("GatedPreTrainedModel", model).set_budget(budget)
        yield
    finally:
        for each, chosen in zip(lists, before, strict=True):
            each.chosen = chosen


@contextmanager
def _on_meta(model: nn.Module) -> Iterator[None]:
    """Have the model in eval, on the meta device, with implementations that run there."""
    was_training = [module for module in model.modules() if module.training]
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values()
    runs_there = {
        "_attn_implementation_internal": "eager",
        "_experts_implementation_internal": "batched_mm",
    }
    chosen = [(config, {name: getattr(config, name) for name in runs_there}) for config in configs]
    # hooks that gather or move parameters have none to move
    wrapped = [(m, m.__dict__.pop("forward")) for m in model.modules() if "forward" in m.__dict__]
    held = [
        (tensors, name, tensor)
        for module in model.modules()
        for tensors in _tensors(module)
        for name, tensor in tensors.items()
        if tensor is not None
    ]
    try:
        model.eval()
        for config in configs:
            vars(config).update(runs_there)
        for tensors, name, tensor in held:
            tensors[name] = tensor.detach().to("meta")
        yield
    finally:
        for tensors, name, tensor in held:
            tensors[name] = tensor
        for module, forward in wrapped:
            module.forward = forward
        for config, implementations in chosen:
            vars(config).update(implementations)
        for module in was_training:
            module.training = True
