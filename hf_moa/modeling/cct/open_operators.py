"""The operators of CCT's form for GPUs (`open_tokens.py`): their names, schemas and shapes.

`fast_control_gpu.py`, `open_tokens_gpu.py` and `paged_keys_gpu.py` compute them, and say what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..core.linear_slices import is_plain
from ..core.operators import define, kernels_run_on, library_name
from ..core.precision import compute_dtype
from ..core.tracing import is_drawn_as_graph, is_transformed

SIZES_DIVIDE_BY = 16  # of matrices that the kernels multiply with


def may_take_kernels(execution: str, x: Tensor) -> bool:
    """Whether they may be asked at all: only where the configuration says so."""
    return (
        execution == "sparse"
        and x.is_cuda
        and x.dtype in (torch.float16, torch.bfloat16)
        and not torch.is_grad_enabled()  # they have no derivative
        and not (is_drawn_as_graph() or is_transformed(x))
        and kernels_run_on(x.device)
    )


def are_plain_as(x: Tensor, linears: Sequence[Any]) -> bool:
    """Whether linear layers are nothing but a weight of the dtype of `x`, and a bias or none."""
    if not all(map(is_plain, linears)):
        return False
    weights = [linear.weight for linear in linears]
    return all(weight.dtype == compute_dtype(weight) == x.dtype for weight in weights)


def are_fit(x: Tensor, linears: Sequence[Any]) -> bool:
    """The same, and in sizes that tiles divide."""
    if not are_plain_as(x, linears):
        return False
    return all(size % SIZES_DIVIDE_BY == 0 for linear in linears for size in linear.weight.shape)


def open_operators() -> Any:
    """PyTorch's names for them."""
    return getattr(torch.ops, _OPEN_LIBRARY)


def _open_computed_by(x: Tensor) -> dict[str, Callable[..., Any]]:
    from .fast_control_gpu import CONTROL_OPERATORS
    from .open_tokens_gpu import OPERATORS
    from .paged_keys_gpu import PAGE_OPERATORS

    return CONTROL_OPERATORS | OPERATORS | PAGE_OPERATORS


def _compute_open(name: str, x: Tensor, *args: Any) -> Any:
    return _open_computed_by(x)[name](x, *args)


_OF_PAGES = (
    "Tensor(a!) keys, Tensor(b!) values, Tensor(c!) positions, Tensor(d!) taken, Tensor(e!) table, "
    "Tensor(f!) rank, Tensor length"
)
# those of the functions in these files, whose import takes Triton's
_OPEN_SCHEMAS = {
    "control_logits": "(Tensor x, Tensor weight, Tensor bias, Tensor out_weight, Tensor out_bias) "
    "-> Tensor",
    "order_tokens": "(Tensor gates, bool sort) -> (Tensor, Tensor, Tensor, Tensor)",
    "project_tokens": "(Tensor x, Tensor order, Tensor rank, Tensor[] weights, Tensor[] biases, "
    "SymInt[] gates, str activation, bool at_tokens) -> Tensor[]",
    "combine_tokens": "(Tensor x, Tensor order, Tensor patterns, Tensor weight, Tensor? bias, "
    "SymInt parts) -> Tensor",
    "attend_tokens": "(Tensor query, Tensor key, Tensor value, Tensor query_order, Tensor query_rank, "
    "Tensor key_order, Tensor key_rank, Tensor? mask, Tensor? bias, SymInt batch, SymInt head_dim, "
    "float scaling, bool causal) -> Tensor",
    "fill_pages": f"({_OF_PAGES}, Tensor key, Tensor value, Tensor key_rank) -> ()",
    "attend_pages": f"({_OF_PAGES}, Tensor query, Tensor query_rank, Tensor? key, Tensor? value, "
    "Tensor? key_rank, Tensor? mask, Tensor? bias, float scaling) -> Tensor",
}
_OPEN_LIBRARY = library_name(_OPEN_SCHEMAS)


def _register_open() -> None:
    defined = define(_OPEN_SCHEMAS, _compute_open)
    if defined:
        _register_open_shapes(defined)
        _register_open_flops()


def _register_open_shapes(defined: dict[str, Any]) -> None:
    @defined["control_logits"].register_fake
    def _(x, weight, bias, out_weight, out_bias):
        return x.new_empty(x.shape[0], out_weight.shape[0])

    @defined["order_tokens"].register_fake
    def _(gates, sort):
        number, parts = gates.shape
        shapes = (parts, number), (parts, number + 1), (number,), (number if sort else 0,)
        return tuple(gates.new_empty(shape, dtype=torch.int32) for shape in shapes)

    @defined["project_tokens"].register_fake
    def _(x, order, rank, weights, biases, gates, activation, at_tokens):
        sizes = [weight.shape[0] for weight in weights]
        return [x.new_empty(x.shape[0], size) for size in ([sum(sizes)] if at_tokens else sizes)]

    @defined["combine_tokens"].register_fake
    def _(x, order, patterns, weight, bias, parts):
        return x.new_empty(x.shape[0], weight.shape[0])

    @defined["attend_tokens"].register_fake
    def _(query, key, value, query_order, *others):
        return query.new_empty(query_order.shape[0], query.shape[1])

    @defined["fill_pages"].register_fake
    def _(*args):
        return None

    @defined["attend_pages"].register_fake
    def _(keys, values, positions, taken, table, rank, length, query, *others):
        return query.new_empty(table.shape[0], query.shape[1])


def _register_open_flops() -> None:
    """Tell `torch.utils.flop_counter` what the operators multiply, if all gates are open."""

    @register_flop_formula(open_operators().control_logits)
    def _(x, weight, bias, out_weight, *args, **kwargs) -> int:
        return 2 * x[0] * (weight[0] * weight[1] + out_weight[0] * out_weight[1])

    @register_flop_formula(open_operators().project_tokens)
    def _(x, order, rank, weights, *args, **kwargs) -> int:
        return 2 * x[0] * sum(rows * columns for rows, columns in weights)

    @register_flop_formula(open_operators().combine_tokens)
    def _(x, order, patterns, weight, *args, **kwargs) -> int:
        return 2 * x[0] * weight[0] * weight[1]

    @register_flop_formula(open_operators().attend_tokens)
    def _(
        query, key, value, query_order, query_rank, key_order, key_rank, mask, bias, batch, *a, **k
    ) -> int:
        return 4 * query_order[0] * (key_order[0] // batch) * query[1]

    @register_flop_formula(open_operators().attend_pages)
    def _(keys, values, positions, taken, table, rank, length, query, *args, **kwargs) -> int:
        return 4 * table[0] * (rank[1] - 1) * query[1]


_register_open()
