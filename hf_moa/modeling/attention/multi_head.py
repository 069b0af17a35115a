"""The mixture that mixes nothing: plain multi-head attention, and what every mixture is to a layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..core.records import Record
from ..parallel.plans import AttentionNames, Plan
from ..parallel.ranks import ONE_RANK, Ranks

Linear = Callable[[int, int], nn.Module]


class MultiHead(nn.Module):
    """h heads, concatenated.

    Its members are what an attention layer asks of every mixture:

    - to build it: `make_query`, `make_output`, `num_kv_heads`, `num_position_biases`;
    - to run it: `route` decides, `query` makes the heads' queries, `position_bias` the bias of their
      scores, `output` the layer's output of their contexts;
    - where tokens are skipped: `take` is the decision for some of the tokens, `no_mix` for one without a
      context;
    - where heads are: `take_heads` is the decision for the first ones;
    - in generation: `prepare_cache`, and `remembers`, whether `route` needs something of earlier tokens;
    - in tensor parallelism: `tensor_plan`, how the projections are split, and `spread_over`.

    Args:
        num_heads: h.
        head_dim: dh.
    """

    def __init__(self, *, num_heads: int, head_dim: int):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = head_dim

    @classmethod
    def from_config(
        cls, config: Any, *, hidden_size: int, num_heads: int, head_dim: int, is_causal: bool
    ) -> MultiHead:
        """The mixture of a layer.

        Args:
            config: a `GatingConfig`.
            hidden_size, num_heads, head_dim: d, h (k for MoA) and dh.
            is_causal: its gates see no later token.
        """
        return cls(num_heads=num_heads, head_dim=head_dim)

    # heads of keys and values that it must have; None for any number that divides h
    num_kv_heads: int | None = None
    remembers = False
    # whether `route` looks at other tokens of the sequence
    sees_other_tokens = False
    # whether both projections are what `linear` makes
    has_plain_projections = True
    # whether a context's heads are normalised together, or each by itself
    has_joint_context = True

    # what has a part of the heads
    ranks: Ranks = ONE_RANK

    @property
    def num_position_biases(self) -> int:
        """Columns of a table of relative position biases."""
        return self.num_heads

    def make_query(self, linear: Linear, hidden_size: int, *, bias: bool = True) -> nn.Module:
        """What `query` projects with; `linear` makes the backbone's own of two sizes."""
        return linear(hidden_size, self.num_heads * self.head_dim)

    def make_output(self, linear: Linear, hidden_size: int, *, bias: bool = True) -> nn.Module:
        """What `output` projects with; see `make_query`."""
        return linear(self.num_heads * self.head_dim, hidden_size)

    def route(
        self, hidden_states: Tensor, padding_mask: Tensor | None, place: Any = None
    ) -> tuple[Any, Record]:
        """The decision for `[B, T, d]` (nothing here), and what the layer reports.

        Args:
            hidden_states: `[B, T, d]`, the inputs of the attention layer.
            padding_mask: `[B, T]` bool, the real tokens among them; None for all.
            place: the layer's `CachePlace`, if there is a cache.
        """
        return None, Record()

    def take(self, mix: Any, subset: Any) -> Any:
        """The decision for a `TokenSubset`, as if it were a batch `[1, n, d]`, or for `OneToken` of each
        sequence, `[B, 1, d]`."""
        return mix

    def take_heads(self, mix: Any, number: int) -> Any:
        """The decision for the first `number` heads."""
        return mix

    def no_mix(self, mix: Any) -> Any:
        """A decision for one token whose context is zero, `[1, 1, h, dh]`."""
        return None

    def query(self, linear: nn.Module, hidden_states: Tensor, mix: Any) -> Tensor:
        """`[B, T, d]` -> `[B, T, h, dh]`."""
        return torch.unflatten(linear(hidden_states), -1, (-1, self.head_dim))

    def position_bias(self, bias: Tensor, mix: Any) -> Tensor:
        """`[1, h, T, S]`, one bias per head, unchanged."""
        return self.ranks.part(bias, 1)

    def output(self, linear: nn.Module, context: Tensor, mix: Any) -> Tensor:
        """`[B, T, h, dh]` -> `[B, T, d]`. In inference it may change the context in place."""
        return linear(context.flatten(-2))

    def prepare_cache(self, place: Any) -> None:
        """Make an empty cache able to hold what `route` needs of earlier tokens."""

    @classmethod
    def splits_keys(cls, config: Any) -> bool:
        """Whether each rank has some of the heads of keys and values, and not all have the same."""
        return True

    @classmethod
    def tensor_plan(cls, config: Any, names: AttentionNames) -> Plan:
        """Each rank has some of the heads, with their part of every projection."""
        kind = names.kind
        plan = {names.query: kind.outputs(), names.output: kind.inputs}
        if names.fuses:
            del plan[names.query]
        return plan | {n: kind.outputs(parts + names.fuses) for n, parts in names.keys.items()}

    def spread_over(self, ranks: Any, num_kv_heads: int) -> tuple[int, int]:
        """Take part of the heads, and return how many: of queries, and of keys and values.

        Raises:
            ValueError: ranks would have different numbers of heads.
        """
        ranks.check("num_attention_heads", self.num_heads)
        ranks.check("num_key_value_heads", num_kv_heads)
        self.ranks = ranks
        return self.num_heads // ranks.number, num_kv_heads // ranks.number
