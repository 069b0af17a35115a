"""What generation with gated models needs beside transformers' own `generate`."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.generation import GenerationMixin


class GatedGenerationMixin(GenerationMixin):
    """`GenerationMixin` that keeps the gates informed of padding.

    With a static cache, transformers turns the padding mask into one of pairs, from which gates
    cannot tell padding: the mask of the step's own tokens then travels beside it.
    """

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        inputs = super().prepare_inputs_for_generation(
            input_ids, attention_mask=attention_mask, **kwargs
        )
        prefix = "decoder_" if self.config.is_encoder_decoder else ""
        mask = kwargs.get("decoder_attention_mask") if prefix else attention_mask
        prepared = inputs.get(f"{prefix}attention_mask")
        if mask is not None and mask.ndim == 2 and (prepared is None or prepared.ndim != 2):
            tokens = inputs.get(f"{prefix}input_ids")
            tokens = inputs["inputs_embeds"] if tokens is None else tokens
            inputs[f"{prefix}padding_mask"] = mask[:, -tokens.shape[1] :].bool().contiguous()
        return inputs
