"""The last layer for the one token of each sequence that a head reads.

A sequence classifier reads one token of the last layer's output: BERT's the first, GPT-2's the last that
is not padding. That layer needs the keys and values of all tokens, as before, but the query, the output
projection and the feed-forward layer of this token only. What the head reads is the same.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..cache.naming import CACHE_NAME
from .mechanism import mechanisms_of
from .tracing import is_traced

IMPLEMENTATIONS = ("sdpa", "eager")  # of attention, whose masks are tensors of pairs


class OneToken(NamedTuple):
    """One token of each sequence.

    Attributes:
        position: of all sequences, from 0, or `[B]` int64 of each.
        shape: B and T, of the tokens that it is one of.
    """

    position: int | Tensor
    shape: tuple[int, int]

    @classmethod
    def of(
        cls, position: int | Tensor | None, tokens: Tensor, others: dict[str, Any] | None = None
    ) -> OneToken | None:
        """Of `tokens` `[B, T, ...]`; None where no position is named.

        Args:
            position: `last_layer_token` of a base model; a negative one counts from the end.
            tokens: of the call.
            others: inputs that it does not go with.

        Raises:
            ValueError: a position that no token has; a tensor that is not `[B]`; any of `others` that is
                not None.
        """
        if position is None:
            return None
        batch, length = tokens.shape[:2]
        for name, value in (others or {}).items():
            if value is not None:
                raise ValueError(
                    f"last_layer_token must be None with {name}, whose layers need all tokens (got "
                    f"{position})."
                )
        if isinstance(position, Tensor):
            if position.shape != (batch,):
                raise ValueError(
                    f"last_layer_token must be a number or a tensor [{batch}], a position for each "
                    f"sequence (got a tensor {list(position.shape)})."
                )
            can_look = position.device.type == "cpu" and not is_traced(position)
            if can_look and bool(((position < -length) | (position >= length)).any()):
                raise ValueError(
                    f"last_layer_token must hold positions among {length} tokens (got "
                    f"{position.tolist()})."
                )
            return cls(torch.where(position < 0, position + length, position), (batch, length))
        if not -length <= position < length:
            raise ValueError(
                f"last_layer_token must be a position among {length} tokens (got {position})."
            )
        return cls(position if position >= 0 else position + length, (batch, length))

    def gather(self, x: Tensor) -> Tensor:
        """`[B, T, ...]` -> `[B, 1, ...]`."""
        if not isinstance(self.position, Tensor):
            # beside each other: of what has gaps, products may differ with its place in memory
            return x[:, self.position : self.position + 1].contiguous()
        return x[torch.arange(len(x), device=x.device), self.position.to(x.device)].unsqueeze(1)

    def of_pairs(self, x: Tensor) -> Tensor:
        """What this token's query has of each key: `[B or 1, heads, T or 1, S]` -> `[..., 1, S]`."""
        if x.shape[2] == 1:
            return x
        if not isinstance(self.position, Tensor):
            return x[:, :, self.position : self.position + 1]
        return self.gather(x.expand(self.shape[0], -1, -1, -1).transpose(1, 2)).transpose(1, 2)

    def mask_up_to(self, device: torch.device) -> Tensor | None:
        """`[B or 1, 1, 1, T]` bool, the tokens up to this one; None for all."""
        length = self.shape[1]
        if not isinstance(self.position, Tensor):
            if self.position == length - 1:
                return None
            visible = torch.arange(length, device=device) <= self.position
            return visible[None, None, None]
        position = self.position.to(device)[:, None]
        return (torch.arange(length, device=device) <= position)[:, None, None]


def of_token(token: OneToken | None, x: Any) -> Any:
    """`[B, T, ...]` -> `[B, 1, ...]` where one token is asked for; None stays."""
    return x if token is None or x is None else token.gather(x)


# what a call or a configuration asks of all tokens of every layer
_OF_ALL_TOKENS = (
    "output_hidden_states",
    "output_attentions",
    "output_router_logits",
    "output_expert_weights",
    "output_cct_gates",
)


def may_compute_one_token(model: Any, inputs: dict[str, Any]) -> bool:
    """Whether a head's call of its base model can leave out tokens of the last layer: where nothing is
    asked for that tells of each token, in eval, and with CCT in training too: its budget loss counts
    what is computed, so that budgets are shares of what eval computes. (Other models draw dropout for
    all tokens, as transformers' do.)

    Args:
        model: the head's.
        inputs: of the call.
    """
    config = model.config
    if model.training and not trains_one_token(model):
        return False
    if config._attn_implementation not in IMPLEMENTATIONS:
        return False
    if any(inputs.get(name) is not None for name in (CACHE_NAME, "cache", "encoder_hidden_states")):
        return False
    for name in _OF_ALL_TOKENS:
        asked = inputs.get(name)
        if getattr(config, name, False) if asked is None else asked:
            return False
    return True


def trains_one_token(model: Any) -> bool:
    """Whether a model has a head that reads one token, and computes the last layer only for this one in
    training, too."""
    if not getattr(model, "reads_one_token", False):
        return False
    return any(mechanism.counts_what_it_computes for mechanism in mechanisms_of(model.config))
