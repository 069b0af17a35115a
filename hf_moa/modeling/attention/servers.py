"""Servers that bring their own attention: they keep the keys, and put requests side by side."""

from __future__ import annotations

# `attn_implementation` of vLLM's and SGLang's backends for transformers' models
SERVERS = ("vllm", "sglang")


def refuse_in_server(name: str) -> None:
    """Refuse gates that look at other tokens: a server shows them those of other requests, and in
    generation none of the earlier ones.

    Raises:
        ValueError: `name` is a server's.
    """
    if name in SERVERS:
        raise ValueError(
            f"attn_implementation must not be {name!r} with learned MAE gates, which look at all tokens "
            "of a sequence: a server has requests side by side, and no place for what gates remember. "
            "Use generate, or a pipeline."
        )
