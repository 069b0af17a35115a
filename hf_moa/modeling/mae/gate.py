"""The gate network of MAE (Peng et al. 2020): pooled inputs -> a distribution over experts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init

from ..core.initialization import starts_beside_weights
from ..core.linear_slices import is_plain, is_watched
from ..core.precision import at_least_float32, cast
from .norm import GateBatchNorm


class MaeGate(nn.Module):
    """The gate network g: pooled inputs -> a distribution over experts (Peng et al. 2020).

    BatchNorm, Linear(d, hidden), tanh, dropout, Linear(hidden, E), softmax. They start as the
    backbone's linear layers do; the last one at zero in a checkpoint that is converted, which so
    computes what it did before.

    Args:
        hidden_size: d.
        num_experts: E.
        gate_hidden_size: width of the hidden layer.
        dropout: dropout on the hidden layer.

    Shapes: `x` `[..., d]`, `valid` `[...]` bool or None -> `[..., E]`, float32 at least.
    """

    gate_kind = "mae"
    last_layer = "out"

    def __init__(self, *, hidden_size: int, num_experts: int, gate_hidden_size: int, dropout: float):
        super().__init__()
        self.norm = GateBatchNorm(hidden_size)
        self.dense = nn.Linear(hidden_size, gate_hidden_size)
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(gate_hidden_size, num_experts)
        self.initialize()

    @property
    def neutral_layers(self) -> tuple[str, ...]:
        """Those that start at zero."""
        return (self.last_layer,) if starts_beside_weights() else ()

    def initialize(self, scales: Any = None) -> None:
        """Start as uniform gates beside weights that were trained without these."""
        for name in self.neutral_layers:
            init.zeros_(getattr(self, name).weight)
        init.zeros_(self.out.bias)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """As every module's, except for the `nn.SyncBatchNorm` that `convert_sync_batchnorm` makes of
        the batch normalisation. It knows no padding: this one stays, with global statistics."""
        if name == "norm" and isinstance(module, nn.SyncBatchNorm):
            self.norm.is_global = True
            return
        super().add_module(name, module)

    def forward(
        self,
        x: Tensor,
        valid: Tensor | None,
        *,
        dtype: torch.dtype,
        pool: Callable[[Tensor], Tensor] | None = None,
        past: Any = None,
    ) -> Tensor:
        """The distribution over experts.

        Args:
            x: pooled inputs; with `pool`, inputs that it averages.
            valid: which of them count towards batch statistics; None for all.
            dtype: of the hidden layer.
            pool: averages behind the hidden layer's matrix, on fewer features than in front of it. Up to
                there the network is affine in eval, and commutes with means. (Except those of no token:
                they are zero there.)
            past: the `GatePast` of a generation; None where there is none, or a graph is made.
        """
        hidden = self._hidden(x, valid, dtype, past)
        if pool is not None:
            hidden = cast(pool(hidden), dtype)
        logits = self.out(self.dropout(torch.tanh(hidden)))
        return at_least_float32(logits).softmax(dim=-1)

    def _hidden(self, x: Tensor, valid: Tensor | None, dtype: torch.dtype, past: Any) -> Tensor:
        """`dense(norm(x))`."""
        norm, dense = self.norm, self.dense
        # its weight may be another module's to gather, as FSDP's
        is_own = type(norm) is GateBatchNorm and type(norm.weight) in (nn.Parameter, Tensor)
        stands_alone = is_own and not is_watched(norm)
        by_batch = stands_alone and norm.uses_batch_statistics
        if by_batch and is_plain(dense):
            # The norm's weight and bias go into the matrix: backward need not keep what they make.
            weight = dense.weight * norm.weight
            bias = dense.bias + dense.weight.to(weight.dtype) @ norm.bias
            x = norm.standardize(x, valid).to(dtype)
            return nn.functional.linear(x, weight.to(dtype), bias.to(dtype))
        if stands_alone and not by_batch and past is not None:
            x = at_least_float32(x)
            of = norm.weight, x.dtype
            scale, shift = past.once(of, partial(norm.scale_and_shift, x.dtype))
            return dense(cast(torch.addcmul(shift, x, scale), dtype))
        return dense(norm(x, valid).to(dtype))
