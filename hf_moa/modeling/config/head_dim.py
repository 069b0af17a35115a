"""The configuration field `head_dim` of backbones whose own configuration has none."""

from __future__ import annotations

from typing import Any


class HeadDim:
    """The size of a head: the one that was set, else hidden_size / num_attention_heads as these are now.

    Other libraries read `config.head_dim` and take it for a number. What is saved is what was set, None
    included: another number of heads, chosen later, then counts.
    """

    def __get__(self, config: Any, owner: type | None = None) -> int | None:
        if config is None:
            return None  # the default, as dataclasses ask for it
        chosen = vars(config).get("head_dim")
        if chosen is not None:
            return chosen
        size, heads = config.hidden_size, config.num_attention_heads
        return size // heads if isinstance(heads, int) and heads > 0 and size % heads == 0 else None

    def __set__(self, config: Any, value: int | None) -> None:
        vars(config)["head_dim"] = value
