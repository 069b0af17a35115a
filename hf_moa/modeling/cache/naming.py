"""Caches by the names of transformers' versions.

Up to 5.23, transformers calls the KV cache `past_key_values`, and that of continuous batching `cache`;
from 5.24 on, it calls both `cache`. Here they are `cache` and `paged_cache`. Models and layers take them
by every name, and outputs have the KV cache by transformers' own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils import ModelOutput

PAGED_CACHE = "paged_cache"
_OLD_NAME = "past_key_values"
# transformers' own name
CACHE_NAME = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else _OLD_NAME
# up to 5.23 the attention implementations themselves add keys to a paged cache
_IMPLEMENTATIONS_TAKE_PAGED_CACHE = "cache" in inspect.signature(sdpa_attention_forward).parameters


def takes_cache_by_any_name(forward: Callable) -> Callable:
    """Decorate a method with a parameter `cache`. Its signature shows transformers' name.

    Raises:
        ValueError: when it is called with a cache by both names.
    """

    @wraps(forward)
    def wrapper(self, *args: Any, **kwargs: Any) -> Any:
        if isinstance(kwargs.get("cache"), PagedAttentionCache):
            kwargs[PAGED_CACHE] = kwargs.pop("cache")
        if _OLD_NAME in kwargs:
            old = kwargs.pop(_OLD_NAME)
            if kwargs.get("cache") is None:
                kwargs["cache"] = old
            elif old is not None:
                raise ValueError(f"Give one cache, as cache or as {_OLD_NAME} (got both).")
        return forward(self, *args, **kwargs)

    signature = inspect.signature(forward)
    wrapper.__signature__ = signature.replace(
        parameters=[
            parameter.replace(name=CACHE_NAME) if parameter.name == "cache" else parameter
            for parameter in signature.parameters.values()
        ]
    )
    return wrapper


def cache_field(outputs: ModelOutput) -> dict[str, Any]:
    """The cache of an output, for another that hands it on."""
    return {CACHE_NAME: getattr(outputs, CACHE_NAME)}


def with_paged_keys(
    key: Tensor, value: Tensor, kwargs: dict[str, Any], *, layer_idx: int
) -> tuple[Tensor, Tensor]:
    """Keys and values `[1, heads, n, dh]` of new tokens, added to the paged cache in `kwargs`.

    Args:
        kwargs: for the attention implementation. The paged cache leaves them, and adds to them what
            implementations have to know.

    Returns:
        Those of earlier tokens too; the new ones alone where transformers' implementations do the rest.
    """
    paged = kwargs.pop(PAGED_CACHE)
    if _IMPLEMENTATIONS_TAKE_PAGED_CACHE:
        kwargs["cache"] = paged
        return key, value
    return paged.update(key, value, layer_idx, kwargs=kwargs)
