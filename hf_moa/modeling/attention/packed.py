"""Texts packed into one sequence, which gates that remember earlier tokens would mix."""

from __future__ import annotations

from torch import Tensor

from ..core.tracing import is_traced


def refuse_packed_texts(position_ids: Tensor) -> None:
    """Where positions start again within a sequence, transformers' masks keep its texts apart. A causal
    gate, which averages a sequence's tokens, would not.

    Raises:
        ValueError: the positions `[B, T]` do not go up by 1.
    """
    if is_traced(position_ids):
        return
    breaks = (position_ids.diff(dim=-1) != 1).nonzero()
    if len(breaks):
        *_, place = breaks[0].tolist()
        positions = position_ids[breaks[0, 0]] if position_ids.ndim == 2 else position_ids
        raise ValueError(
            "Without an attention_mask, position_ids must go up by 1 in a model with MAE gates: these "
            "would mix the texts of a packed sequence (got "
            f"{positions[place].item()} and {positions[place + 1].item()} beside each other). Give each "
            "text a sequence of its own, padded and with an attention_mask."
        )
