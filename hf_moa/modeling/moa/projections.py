"""Linear maps that differ from expert to expert, applied to the k experts of each token.

Two maps, because attention stands between them: into the heads (`ExpertInput`) and out of them
(`ExpertOutput`). Each has three forms of the same function, and takes the one that is fastest:

- dense: all N experts in one matrix product, of which the chosen are kept. Fastest where N is not much
  larger than k, and the only one in exported graphs. On a GPU it has an operator, too.
- by expert (`fast_products.py`): no other expert is computed. On a CPU or a GPU, for many tokens.
- by slot: a vector product for each of a single token's experts. On a CPU, to decode.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import guard_or_false
from transformers import initialization as init

from ..core.initialization import InitScales
from ..core.macs import Macs, macs_of_experts
from ..core.operators import kernels_run_on
from ..core.precision import compute_dtype
from ..core.tracing import is_drawn_as_graph, is_traced, is_transformed
from .fast_products import expert_input, expert_output

_FEWEST_MOVED = 2**20  # numbers of the chosen


@torch.compiler.assume_constant_result
def multiplies_on_tensor_cores(dtype: torch.dtype) -> bool:
    """Of a GPU; float32 where the user allows to round it to TF32."""
    return dtype.itemsize == 2 or torch.backends.cuda.matmul.fp32_precision == "tf32"


def computes_by_expert(
    index: Tensor,
    weight: Tensor,
    execution: str = "auto",
    num_ranks: int = 1,
    *,
    adds_up: bool = False,
) -> bool:
    """Whether to compute expert by expert: as `moa_execution` says, or where it is faster.

    Dense products cost N a token. By expert they cost k, times a factor for moving the rows, and a
    fixed price, in multiplications; both were measured, on CPUs and on an H100. On a CPU the price is
    that of an expert; half precision multiplies so fast that moving is most of the cost. So it is on the
    tensor cores of a GPU, where the price is the start of the kernels.

    Args:
        index: `[B, T, k]`, chosen experts.
        weight: `[N, a, b]`.
        execution: `moa_execution` of the configuration.
        num_ranks: processes that share the experts, of which this one has N.
        adds_up: the products of a token are summed. On a GPU that goes through `[tokens * k, d]` in
            memory; its factor is reckoned from parts that were timed on an H100, and not timed whole.
    """
    if execution == "dense" or is_drawn_as_graph() or is_transformed():
        return False
    if execution == "sparse":
        return weight.device.type == "cpu" or kernels_run_on(weight.device)
    num_experts, a, b = weight.shape
    dtype = compute_dtype(weight)
    if weight.device.type == "cpu":
        factor, price = (4.0, 5e6) if dtype.itemsize == 2 else (1.4, 1.3e6)
        price *= num_experts
    elif weight.device.type == "cuda" and dtype in (torch.float16, torch.bfloat16, torch.float32):
        is_fast = multiplies_on_tensor_cores(dtype)
        factor, price = (8.0 if adds_up else 5.0, 2e10) if is_fast else (2.0, 5e9)
    else:
        return False
    num_tokens, num_selected = index.shape[0] * index.shape[1], index.shape[2] / num_ranks
    # false where a compiled graph does not know how many tokens there are
    is_faster = guard_or_false(num_tokens * (num_experts - factor * num_selected) * a * b > price)
    return is_faster and (weight.device.type == "cpu" or kernels_run_on(weight.device))


def computes_all_by_operator(index: Tensor, weight: Tensor, execution: str = "auto") -> bool:
    """Whether the dense form is the operator of `fast_products.py`: on a GPU, for so many tokens that
    moving the chosen takes longer than starting an operator."""
    if execution != "auto" or weight.device.type != "cuda":
        return False
    if is_drawn_as_graph() or is_transformed():
        return False
    if compute_dtype(weight) not in (torch.float16, torch.bfloat16, torch.float32):
        return False
    width = min(weight.shape[1:])
    return guard_or_false(index.numel() * width > _FEWEST_MOVED) and kernels_run_on(weight.device)


def computes_by_slot(index: Tensor, weight: Tensor, execution: str = "auto", num_ranks: int = 1) -> bool:
    """Whether to take the k products of a single token one by one; see `computes_by_expert`."""
    if execution == "dense":
        return False
    if weight.device.type != "cpu" or torch.is_grad_enabled() or is_traced(index):
        return False
    if index.shape[0] * index.shape[1] != 1 or is_transformed():
        return False
    return num_ranks * len(weight) >= 3 * index.shape[2]


def _macs(weight: Tensor, x: Tensor, index: Tensor | None) -> Macs:
    if index is not None:
        return macs_of_experts(weight, index)
    macs = x.shape[0] * x.shape[1] * weight.numel()
    return Macs(macs, macs)


class ExpertInput(nn.Module):
    """`y_{t,s} = W_e x_t + b_e` for each chosen expert `e = index[t, s]`.

    Parameters: `weight` `[N, out, in]`, `bias` `[N, out]`.
    Shapes: `x` `[B, T, in]`, `index` `[B, T, k]` -> `[B, T, k, out]`; without an index all experts in
    their order, `[B, T, N, out]`.

    Attributes:
        num_ranks: processes that share the experts. If there are others, N stands in `index` for an
            expert of another process, of which the result is zero.
    """

    num_ranks = 1

    def __init__(
        self,
        *,
        num_experts: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        execution: str = "auto",
    ):
        super().__init__()
        self.moa_execution = execution
        self.num_experts = num_experts
        self.out_features = out_features
        self.weight = nn.Parameter(torch.empty(num_experts, out_features, in_features))
        self.bias = nn.Parameter(torch.zeros(num_experts, out_features)) if bias else None
        nn.init.normal_(self.weight, std=in_features**-0.5)

    def initialize(self, scales: InitScales) -> None:
        init.normal_(self.weight, std=scales.query)
        if self.bias is not None:
            init.zeros_(self.bias)

    def count_macs(self, x: Tensor, index: Tensor | None, **kwargs: Any) -> Macs:
        return _macs(self.weight, x, index)

    def forward(self, x: Tensor, index: Tensor | None = None) -> Tensor:
        if index is None:
            return self._all(x)
        by_expert = computes_by_expert(index, self.weight, self.moa_execution, self.num_ranks)
        if by_expert or computes_all_by_operator(index, self.weight, self.moa_execution):
            dtype = compute_dtype(self.weight)
            y = expert_input(
                x.flatten(0, 1).to(dtype),
                index.flatten(0, 1),
                self.weight.to(dtype),
                None if self.bias is None else self.bias.to(dtype),
                by_expert=by_expert,
                has_others=self.num_ranks > 1,
            )
            return torch.unflatten(y, 0, index.shape[:2])
        if computes_by_slot(index, self.weight, self.moa_execution, self.num_ranks):
            slots = [self._slot(x, expert) for expert in index.flatten().tolist()]
            return torch.stack(slots, dim=-2)
        return self._dense(x, index)

    def _slot(self, x: Tensor, expert: int) -> Tensor:
        if expert == self.num_experts:  # another process has it
            return x.new_zeros(*x.shape[:-1], self.out_features)
        bias = None if self.bias is None else self.bias[expert]
        return nn.functional.linear(x, self.weight[expert], bias)

    def _all(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.flatten()
        # shape: (B, T, in) -> (B, T, N * out) -> (B, T, N, out)
        every = nn.functional.linear(x, self.weight.flatten(0, 1), bias)
        return torch.unflatten(every, -1, (self.num_experts, self.out_features))

    def _dense(self, x: Tensor, index: Tensor) -> Tensor:
        every = self._all(x)
        if self.num_ranks > 1:
            every = nn.functional.pad(every, (0, 0, 0, 1))
        chosen = index.unsqueeze(-1).expand(*index.shape, self.out_features)
        return every.gather(-2, chosen)


class ExpertOutput(nn.Module):
    """`y_t = sum_s weight_{t,s} W_e^T x_{t,s} + b` with `e = index[t, s]`; one bias on the sum.

    Parameters: `weight` `[N, in, out]`, `bias` `[out]`.
    Shapes: `x` `[B, T, k, in]`, `index` and `weight` `[B, T, k]` -> `[B, T, out]`. The index is None
    where these are all experts in their order.

    Attributes:
        num_ranks: see `ExpertInput`.
    """

    num_ranks = 1

    def __init__(
        self,
        *,
        num_experts: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        execution: str = "auto",
    ):
        super().__init__()
        self.moa_execution = execution
        self.num_experts = num_experts
        self.in_features = in_features
        self.weight = nn.Parameter(torch.empty(num_experts, in_features, out_features))
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None
        nn.init.normal_(self.weight, std=in_features**-0.5)

    def initialize(self, scales: InitScales) -> None:
        # its weights sum to 1: where k heads add up, k experts are averaged
        init.normal_(self.weight, std=scales.output * scales.num_heads)
        if self.bias is not None:
            init.zeros_(self.bias)

    def count_macs(self, x: Tensor, index: Tensor | None, *args: Any, **kwargs: Any) -> Macs:
        return _macs(self.weight, x, index)

    def forward(self, x: Tensor, index: Tensor | None, weight: Tensor) -> Tensor:
        y = self._products(x, index, weight)
        return y if self.bias is None else y + self.bias

    def _products(self, x: Tensor, index: Tensor | None, weight: Tensor) -> Tensor:
        if index is None:
            weighted = x * weight.unsqueeze(-1).to(x.dtype)
            return weighted.flatten(-2) @ self.weight.flatten(0, 1)
        by_expert = computes_by_expert(
            index, self.weight, self.moa_execution, self.num_ranks, adds_up=True
        )
        if by_expert or computes_all_by_operator(index, self.weight, self.moa_execution):
            dtype = compute_dtype(self.weight)
            y = expert_output(
                x.flatten(0, 1).to(dtype),
                index.flatten(0, 1),
                weight.flatten(0, 1).to(dtype),
                self.weight.to(dtype),
                by_expert=by_expert,
                has_others=self.num_ranks > 1,
            )
            return torch.unflatten(y, 0, index.shape[:2])
        if computes_by_slot(index, self.weight, self.moa_execution, self.num_ranks):
            weighted = x * weight.unsqueeze(-1).to(x.dtype)
            own = [(s, e) for s, e in enumerate(index.flatten().tolist()) if e < self.num_experts]
            y = x.new_zeros(*x.shape[:2], self.weight.shape[2])
            for slot, expert in own:
                y = y + weighted[:, :, slot] @ self.weight[expert]
            return y
        return self._dense(x, index, weight)

    def _dense(self, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        weighted = x * weight.unsqueeze(-1).to(x.dtype)
        chosen = index.unsqueeze(-1).expand_as(weighted)
        # shape: (B, T, k, in) -> (B, T, N, in), zero where an expert was not chosen
        others = int(self.num_ranks > 1)
        spread = weighted.new_zeros(*x.shape[:-2], self.num_experts + others, self.in_features)
        # in place, which spares a copy, unless a transform adds a dimension to only the experts
        scatter = spread.scatter if is_transformed() else spread.scatter_
        spread = scatter(-2, chosen, weighted)[..., : self.num_experts, :]
        # shape: (B, T, N * in) @ (N * in, out) -> (B, T, out)
        return spread.flatten(-2) @ self.weight.flatten(0, 1)
