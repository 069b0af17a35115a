"""How tensor parallelism splits the layers that transformers' own styles do not know.

transformers' engine (`from_pretrained(..., distributed_config=DistributedConfig(tp_size=...))`) asks a
plan of names which style a module has; see `plans.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..core.linear_slices import plain_of_first_inputs, plain_output_slice
from .ranks import DealtRanks, TensorRanks

try:
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, TensorParallelLayer

    HAS_STYLES = dist.is_available()
except ImportError:  # an older transformers, or a torch without distributed training
    HAS_STYLES = False
    TensorParallelLayer = object  # type: ignore[assignment,misc]


class Spread(TensorParallelLayer):
    """A module that is told over which ranks its heads or neurons are spread: `spread_over`.

    Args:
        ranks: `TensorRanks` or a subclass.
    """

    def __init__(self, ranks: type[TensorRanks] = TensorRanks):
        self.ranks = ranks

    def install_forward(self, module: Any, mesh: Any) -> Any:
        module.spread_over(self.ranks(mesh))
        return module


class _OwnShard(TensorParallelLayer):
    """A style whose module computes with the rank's own part of its parameters."""

    def should_use_local_tensors(self, module: nn.Module) -> bool:
        return True

    def placement(self, module: nn.Module, name: str, shape: Any, number: int) -> Any:
        """Where the rank's part of a parameter is; `number` is that of the ranks."""
        raise NotImplementedError

    def shard_param(self, module: nn.Module, param: str, mesh: Any) -> None:
        whole = module._parameters.get(param)
        if whole is None:
            return
        placement = self.placement(module, param, whole.shape, mesh.size())
        module._parameters[param] = nn.Parameter(
            distribute_tensor(whole, mesh, [placement], src_data_rank=None),
            requires_grad=whole.requires_grad,
        )


class _Outputs(_OwnShard):
    """Each rank makes some of a layer's outputs, of the whole input."""

    def transform_inputs_pre_forward(self, module: Any, args: Any, kwargs: Any, mesh: Any) -> Any:
        return (TensorRanks(mesh).shared(args[0]), *args[1:]), kwargs


class _Inputs(_OwnShard):
    """Each rank has some of a layer's inputs; their products are added up, then the bias."""

    def install_forward(self, module: Any, mesh: Any) -> Any:
        forward = module.forward

        def summed(*args: Any, **kwargs: Any) -> Tensor:
            bias = module._parameters.get("bias")
            if bias is not None:  # it would be added once for each rank
                module._parameters["bias"] = self.no_bias(module)
            try:
                with self.context_around_forward(module, mesh):
                    own = forward(*args, **kwargs)
            finally:
                if bias is not None:
                    module._parameters["bias"] = bias
            total = TensorRanks(mesh).sum(own)
            return total if bias is None else total + bias.to_local()

        module.forward = summed
        return module

    def no_bias(self, module: nn.Module) -> Tensor | None:
        """What the module takes for no bias."""
        return None


class SlicedOutputs(_Outputs):
    """Outputs of a `Conv1D` that holds several matrices side by side: each of them over all ranks.
    (Every rank has the whole bias, which FSDP could not shard further.)

    Args:
        parts: the number of matrices.
    """

    def __init__(self, parts: int):
        self.parts = parts

    def num_parts(self, number: int) -> int:
        """How many there are, each of which `number` ranks share."""
        return self.parts

    def placement(self, module: nn.Module, name: str, shape: Any, number: int) -> Any:
        size = shape[_output_dim(module)] if name == "weight" else shape[0]
        if size % (self.num_parts(number) * number):
            raise ValueError(
                f"The {size} outputs of a {type(module).__name__} cannot be shared by tp_size="
                f"{number}: each of its {self.num_parts(number)} parts must have a multiple of it."
            )
        if name == "bias":
            return Replicate()
        return _strided(_output_dim(module), self.num_parts(number))

    def install_forward(self, module: Any, mesh: Any) -> Any:
        if isinstance(module, Conv1D):
            module.nf //= mesh.size()  # by which it forms its output
        return super().install_forward(module, mesh)

    @contextmanager
    def context_around_forward(self, module: Any, mesh: Any) -> Iterator[None]:
        with super().context_around_forward(module, mesh):
            whole = module._parameters["bias"]
            if whole is not None:
                parts = whole.view(self.num_parts(mesh.size()), -1)
                module._parameters["bias"] = TensorRanks(mesh).part(parts, 1).flatten()
            try:
                yield
            finally:
                module._parameters["bias"] = whole


class SlicedInputs(_Inputs):
    """Inputs of a `Conv1D`."""

    def placement(self, module: nn.Module, name: str, shape: Any, number: int) -> Any:
        return Replicate() if name == "bias" else Shard(0)

    def no_bias(self, module: Any) -> Tensor | None:
        # it adds one in any case
        return module.weight.to_local().new_zeros(module.nf)


class DealtOutputs(SlicedOutputs):
    """Outputs of a `Conv1D` or `nn.Linear` in units, which are dealt to the ranks in turn, so that the
    first ones are of all ranks. A call may ask for the first of a rank's.

    Args:
        units: heads or neurons, of all matrices side by side.
    """

    def __init__(self, units: int):
        self.units = units

    def num_parts(self, number: int) -> int:
        if self.units % number:
            raise ValueError(
                f"tp_size must divide the {self.units} heads or neurons that are shared (got {number})."
            )
        return self.units // number

    def install_forward(self, module: Any, mesh: Any) -> Any:
        def own_outputs(x: Tensor, start: int, end: int) -> Tensor:
            (x,), _ = self.transform_inputs_pre_forward(module, (x,), {}, mesh)
            with self.context_around_forward(module, mesh):
                return plain_output_slice(module, x, start, end)

        module.output_slice = own_outputs
        return super().install_forward(module, mesh)


class DealtInputs(_Inputs):
    """Inputs of a `Conv1D` or `nn.Linear` in units, which are dealt to the ranks in turn. A call may
    have only the first of a rank's.

    Args:
        units: heads or neurons.
    """

    def __init__(self, units: int):
        self.units = units

    def placement(self, module: nn.Module, name: str, shape: Any, number: int) -> Any:
        if name == "bias":
            return Replicate()
        return _strided(1 - _output_dim(module), self.units // number)

    def install_forward(self, module: Any, mesh: Any) -> Any:
        module.takes_first_inputs = True
        module.forward = partial(plain_of_first_inputs, module)
        return super().install_forward(module, mesh)


def _output_dim(module: nn.Module) -> int:
    """Of a linear layer's weight."""
    return 1 if isinstance(module, Conv1D) else 0


def _strided(dim: int, parts: int) -> Any:
    """Each of some parts over all ranks."""
    return Shard(dim) if parts == 1 else _StridedShard(dim, split_factor=parts)


def _take_experts(module: Any, mesh: Any, *, in_groups: bool) -> None:
    """Make a module of MoA one of the rank's experts; see `ExpertInputs`."""
    module.num_experts //= mesh.size()
    if not in_groups:
        module.num_ranks = mesh.size()


class ExpertInputs(_Outputs):
    """`ExpertInput` of MoA: each rank has some of the experts, and attends for some of the slots.

    The rank of a slot's expert makes its query, and sends it to the rank of the slot. So all ranks
    attend for as many slots, whatever experts the tokens have.

    Args:
        in_groups: a rank's slots have its experts, which spares the sending: the experts stand in
            groups of which each rank has some.
    """

    def __init__(self, *, in_groups: bool):
        self.in_groups = in_groups

    def placement(self, module: nn.Module, name: str, shape: Any, number: int) -> Any:
        return Shard(0)

    def install_forward(self, module: Any, mesh: Any) -> Any:
        _take_experts(module, mesh, in_groups=self.in_groups)
        return super().install_forward(module, mesh)

    def transform_inputs_pre_forward(self, module: Any, args: Any, kwargs: Any, mesh: Any) -> Any:
        ranks, (x, index) = TensorRanks(mesh), args
        if self.in_groups:
            index = ranks.part(index, -1)
        return (ranks.shared(x), ranks.own_experts(index, module.num_experts)), kwargs

    def transform_output_post_forward(self, module: Any, output: Tensor, mesh: Any) -> Tensor:
        return output if self.in_groups else TensorRanks(mesh).exchange(output, 2)


class ExpertOutputs(_Inputs):
    """`ExpertOutput` of MoA: each rank adds up what its own experts make of the contexts of all slots,
    or of its own (`in_groups`, see `ExpertInputs`), and the ranks' sums are added."""

    def __init__(self, *, in_groups: bool):
        self.in_groups = in_groups

    def placement(self, module: nn.Module, name: str, shape: Any, number: int) -> Any:
        return Replicate() if name == "bias" else Shard(0)

    def install_forward(self, module: Any, mesh: Any) -> Any:
        _take_experts(module, mesh, in_groups=self.in_groups)
        ranks, forward = TensorRanks(mesh), module.forward

        def of_own(x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
            if self.in_groups:
                index, weight = ranks.part(index, -1), ranks.part(weight, -1)
            else:
                x, weight = ranks.gather(x, 2), ranks.shared(weight)
            return forward(x, ranks.own_experts(index, module.num_experts), weight)

        module.forward = of_own
        return super().install_forward(module, mesh)


class SharedOutput(TensorParallelLayer):
    """A layer that every rank has, whose output the ranks use in part."""

    def transform_output_post_forward(self, module: Any, output: Tensor, mesh: Any) -> Tensor:
        return TensorRanks(mesh).shared(output)


class WholeNorm(TensorParallelLayer):
    """A norm of all heads together, each rank having some: it norms all of them, and keeps its own."""

    def transform_inputs_pre_forward(self, module: Any, args: Any, kwargs: Any, mesh: Any) -> Any:
        own = DTensor.from_local(args[0], mesh, [Shard(args[0].ndim - 1)], run_check=False)
        return (own.redistribute(placements=[Replicate()]).to_local(), *args[1:]), kwargs

    def transform_output_post_forward(self, module: Any, output: Tensor, mesh: Any) -> Tensor:
        return TensorRanks(mesh).part(output, -1)


class SharedParameters(TensorParallelLayer):
    """A layer whose parameters every rank has, for its own heads."""

    @contextmanager
    def context_around_forward(self, module: Any, mesh: Any) -> Iterator[None]:
        parameters = dict(module._parameters)
        ranks = TensorRanks(mesh)
        module._parameters.update(
            {n: p if p is None else ranks.shared(p) for n, p in parameters.items()}
        )
        try:
            yield
        finally:
            module._parameters.update(parameters)


_NUMBERED = re.compile(r"(moa_\w+)_(\d+)")


def register_styles(names: Any) -> None:
    """Make known to transformers those of its styles' names that are of this file."""
    styles: Any = ALL_PARALLEL_STYLES
    for name in names:
        if name in styles:
            continue
        if (found := _NUMBERED.fullmatch(name)) and found[1] in _NUMBERED_STYLES:
            styles.register(name, _NUMBERED_STYLES[found[1]](int(found[2])))
        elif name in _STYLES:
            styles.register(name, _STYLES[name]())


_NUMBERED_STYLES: dict[str, Callable[[int], Any]] = {
    "moa_outputs": SlicedOutputs,
    "moa_dealt_outputs": DealtOutputs,
    "moa_dealt_inputs": DealtInputs,
}
_STYLES: dict[str, Callable[[], Any]] = {
    "moa_spread": Spread,
    "moa_deal": partial(Spread, DealtRanks),
    "moa_inputs": SlicedInputs,
    "moa_expert_inputs": partial(ExpertInputs, in_groups=False),
    "moa_expert_outputs": partial(ExpertOutputs, in_groups=False),
    "moa_group_inputs": partial(ExpertInputs, in_groups=True),
    "moa_group_outputs": partial(ExpertOutputs, in_groups=True),
    "moa_shared_output": SharedOutput,
    "moa_shared_parameters": SharedParameters,
    "moa_whole_norm": WholeNorm,
}
