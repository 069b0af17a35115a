"""`GatedAttention`: an attention layer to use by itself, or in a backbone of your own."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from ..cache.naming import takes_cache_by_any_name
from ..core.records import Record
from .flow import AttentionFlow
from .multi_head import MultiHead


class AttentionOutput(NamedTuple):
    """What `GatedAttention` returns.

    Attributes:
        hidden_states: `[B, T, d]`.
        attentions: `[B, heads, T, S]` where the implementation gives them ("eager"), else None.
        record: what the mixture and the gates did; see `Record`.
    """

    hidden_states: Tensor
    attentions: Tensor | None
    record: Record


class GatedAttention(AttentionFlow):
    """Attention whose heads are a mixture, with projections `q_proj`, `k_proj`, `v_proj` and `o_proj`.

    Args:
        hidden_size: d.
        num_heads: h, of plain multi-head attention; leave it out with a `mixture`, which has its own.
        head_dim: dh, of plain multi-head attention; default: d / h.
        mixture: the heads, such as `MixtureOfHeads(...)` (MAE) or `MixtureOfAttentionExperts(...)`
            (MoA); default: plain multi-head attention.
        bias: whether the projections have one.
        attn_implementation: "sdpa", "eager", "flex_attention" or any other that transformers knows.
        num_kv_heads, gates, scaling, attention_dropout, is_causal, is_cross_attention, window, rotate,
            layer_idx: see `AttentionFlow`.

    Raises:
        ValueError: neither `num_heads` nor `mixture`, or both; sizes that do not fit.

    Example:
        >>> layer = GatedAttention(64, 8, is_causal=True)
        >>> layer(torch.randn(2, 5, 64)).hidden_states.shape
        torch.Size([2, 5, 64])
        >>> heads = MixtureOfHeads(hidden_size=64, num_heads=8, head_dim=8, num_dropped=1)
        >>> y, _, record = GatedAttention(64, mixture=heads)(torch.randn(2, 5, 64))
        >>> record.expert_weights.shape
        torch.Size([2, 8])
    """

    output_projection = "o_proj"

    def __init__(
        self,
        hidden_size: int,
        num_heads: int | None = None,
        *,
        head_dim: int | None = None,
        mixture: MultiHead | None = None,
        bias: bool = True,
        attn_implementation: str = "sdpa",
        **options: Any,
    ):
        if mixture is None and num_heads is not None:
            if head_dim is None and hidden_size % num_heads:
                raise ValueError(
                    f"num_heads must divide hidden_size={hidden_size}, or head_dim be given (got "
                    f"{num_heads})."
                )
            mixture = MultiHead(num_heads=num_heads, head_dim=head_dim or hidden_size // num_heads)
        elif mixture is None or num_heads is not None:
            raise ValueError(f"Give one of num_heads and mixture (got {num_heads} and {mixture}).")
        elif head_dim not in (None, mixture.head_dim):
            raise ValueError(
                f"head_dim is the mixture's, {mixture.head_dim} (got {head_dim}); leave it out."
            )
        super().__init__(hidden_size=hidden_size, mixture=mixture, **options)
        self._attn_implementation = attn_implementation

        def linear(size_in: int, size_out: int) -> nn.Linear:
            return nn.Linear(size_in, size_out, bias=bias)

        self.q_proj = mixture.make_query(linear, hidden_size, bias=bias)
        self.k_proj = linear(hidden_size, self.num_kv_heads * self.head_dim)
        self.v_proj = linear(hidden_size, self.num_kv_heads * self.head_dim)
        self.o_proj = mixture.make_output(linear, hidden_size, bias=bias)

    @property
    def attn_implementation(self) -> str:
        return self._attn_implementation

    def project_query(self, hidden_states: Tensor, mix: Any) -> Tensor:
        return self.mixture.query(self.q_proj, hidden_states, mix)

    def project_key_value(self, source: Tensor) -> tuple[Tensor, Tensor]:
        return self.k_proj(source), self.v_proj(source)

    @property
    def head_projections(self) -> tuple[tuple[nn.Module, int], ...]:
        return (self.q_proj, 0), (self.k_proj, 0), (self.v_proj, 0)

    @takes_cache_by_any_name
    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        *,
        padding_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_padding_mask: Tensor | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> AttentionOutput:
        """
        Args:
            hidden_states: `[B, T, d]`.
            attention_mask: for the implementation, as transformers' masking utilities make it. Default:
                of `padding_mask` (`encoder_padding_mask` in cross-attention), causality and window.
            padding_mask: `[B, T]` bool, the real tokens; None for all.
            encoder_hidden_states, encoder_padding_mask: `[B, S, d]` and `[B, S]`, in cross-attention.
            cache: keys and values of earlier tokens.
            kwargs: `position_embeddings` for `rotate`; all else goes to the implementation.
        """
        if attention_mask is None:
            source_mask = encoder_padding_mask if self.is_cross_attention else padding_mask
            past = (
                0 if cache is None or self.is_cross_attention else cache.get_seq_length(self.layer_idx)
            )
            attention_mask = self._mask(hidden_states, source_mask, past)
        attended = self.attend(
            hidden_states,
            attention_mask,
            padding_mask=padding_mask,
            encoder_hidden_states=encoder_hidden_states,
            encoder_padding_mask=encoder_padding_mask,
            cache=cache,
            **kwargs,
        )
        return AttentionOutput(self.output(self.o_proj, attended), attended.attentions, attended.record)

    def _mask(self, x: Tensor, source_mask: Tensor | None, past: int) -> Tensor | None:
        """`[B or 1, 1, T, S]`, True where a query sees a key, or what eager attention adds to scores;
        None where the implementation needs none."""
        length, is_eager = x.shape[1], self.attn_implementation == "eager"
        if source_mask is not None and past:
            raise ValueError(
                "padding_mask tells nothing of the tokens in the cache: give an attention_mask, too."
            )
        mask = None
        if self.is_causal and (past or self.window is not None or source_mask is not None or is_eager):
            query = torch.arange(past, past + length, device=x.device).unsqueeze(-1)
            key = torch.arange(past + length, device=x.device)
            mask = key <= query
            if self.window is not None:
                mask = mask & (key > query - self.window)
            mask = mask[None, None]
        if source_mask is not None:
            mask = source_mask[:, None, None] & (True if mask is None else mask)
            mask = mask.expand(-1, -1, length, -1)
        if mask is None or not is_eager:
            return mask
        return x.new_zeros(mask.shape).masked_fill(~mask, torch.finfo(x.dtype).min)
