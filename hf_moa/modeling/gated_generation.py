"""What generation with gated models needs beside transformers' own `generate`."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.generation import GenerationMixin

from .configuration_gating import GATING_OUTPUT_FIELDS
from .outputs import GatingOutput


class GatedGenerationMixin(GenerationMixin):
    """`GenerationMixin` that keeps the gates informed of padding, and their outputs out of the way."""

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        # With a static cache, transformers turns the padding mask into one of pairs, from which gates
        # cannot tell padding: the mask of the step's own tokens then travels beside it.
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

    def _expand_inputs_for_generation(self, *args: Any, **kwargs: Any) -> tuple[Tensor, dict[str, Any]]:
        # transformers repeats every tensor of the encoder's output for each beam, which scalars refuse.
        encoder_outputs = kwargs.get("encoder_outputs")
        if isinstance(encoder_outputs, GatingOutput):
            kwargs["encoder_outputs"] = type(encoder_outputs)(
                **{k: v for k, v in encoder_outputs.items() if k not in GATING_OUTPUT_FIELDS}
            )
        return super()._expand_inputs_for_generation(*args, **kwargs)
