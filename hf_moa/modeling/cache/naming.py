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

from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.modeling_outputs import BaseModelOutputWithPast

PAGED_CACHE = "paged_cache"
_OLD_NAME = "past_key_values"
# transformers' own name
CACHE_NAME = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else _OLD_NAME


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
    wrapper.__signature__ = signature.replace(  # type: ignore[attr-defined]  # for `inspect`
        parameters=[
            parameter.replace(name=CACHE_NAME) if parameter.name == "cache" else parameter
            for parameter in signature.parameters.values()
        ]
    )
    return wrapper
