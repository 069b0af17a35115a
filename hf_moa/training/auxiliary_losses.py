"""Auxiliary losses of an accumulated batch: each micro-batch's counts by its share of the tokens.

Of the losses' gradients, 8 sequences at once, 2 x 4 and 4 x 2 then give the same for

- the routers' z-loss, a mean over tokens: exactly;
- CCT's budget loss: exactly where micro-batches hold sequences of the same lengths and one budget, and
  all of them cost more than it (or all less). Else nearly: attention costs the square of a length, so
  that a share of the tokens is not quite one of the cost;
- the balance, importance and load losses: nearly. They are products of means over the batch, and a
  micro-batch's is an estimate of the whole one's.

How nearly, in a tiny T5 of the tests (`test_other_losses_of_micro_batches_are_estimates`), sequences of
4 to 11 tokens, 2 x 4 against 8: the gradient of the whole loss differs by less than 0.2 % with the
balance loss at its default coefficient, and by less than 3 % with the budget loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

import torch
from torch import Tensor

from hf_moa.gated_models import mechanisms_in
from hf_moa.modeling.core.task_losses import up_to_last_label


def has_auxiliary_losses(config: Any) -> bool:
    """Whether training adds losses of a mechanism to a model with this config."""
    return any(mechanism.has_auxiliary_losses for mechanism in mechanisms_in(config))


def count_tokens(batch: Mapping[str, Any], *, is_encoder_decoder: bool) -> Tensor | None:
    """The tokens that gates count in a batch: `[1]`; `[2]` in the encoder and in the decoder.

    Args:
        batch: what the model is called with.
        is_encoder_decoder: the model has a decoder beside its encoder.

    Returns:
        None where the batch holds no ids or embeddings to count.
    """
    encoder = _count(batch, "input_ids", "inputs_embeds", "attention_mask")
    if encoder is None:
        return None
    if not is_encoder_decoder:
        return encoder.view(1)
    decoder = _count(batch, "decoder_input_ids", "decoder_inputs_embeds", "decoder_attention_mask")
    labels = batch.get("labels")
    if batch.get("decoder_padding_mask") is not None:
        decoder = batch["decoder_padding_mask"].sum()
    elif batch.get("decoder_attention_mask") is None and _are_tokens(labels):
        decoder = up_to_last_label(labels).sum()  # as `MoaT5ForConditionalGeneration` has it
    elif decoder is None:
        decoder = encoder  # its ids are the encoder's
    return torch.stack([encoder, decoder.to(encoder.device)])


def weighted_auxiliary_loss(outputs: Any, share: Tensor) -> Tensor:
    """The auxiliary losses of one micro-batch, as a part of the accumulated batch's.

    Args:
        outputs: of the model in training mode, with `aux_loss`.
        share: what each half weighs, as `count_tokens` names them.
    """
    if len(share) == 1:
        return outputs["aux_loss"].mean() * share[0].to(outputs["aux_loss"].device)
    halves = [outputs.get(f"{half}_aux_loss") for half in ("encoder", "decoder")]
    weighted = [
        loss.mean() * each.to(loss.device)
        for loss, each in zip(halves, share, strict=True)
        if loss is not None
    ]
    return sum(loss.to(weighted[-1].device) for loss in weighted)


def weigh_auxiliary_loss(outputs: Any, share: Tensor) -> None:
    """Replace the auxiliary losses in `outputs["loss"]` by `weighted_auxiliary_loss`."""
    if outputs.get("aux_loss") is not None and outputs.get("task_loss") is not None:
        outputs["loss"] = outputs["task_loss"] + weighted_auxiliary_loss(outputs, share)


def name_task_loss(outputs: Any) -> None:
    """Give outputs a `task_loss` where only auxiliary losses would have made one, and there are none."""
    has_loss = isinstance(outputs, dict) and outputs.get("loss") is not None
    if has_loss and outputs.get("task_loss") is None:
        outputs["task_loss"] = outputs["loss"]


def auxiliary_part(outputs: Any) -> Tensor | float:
    """What auxiliary losses add to `outputs["loss"]`."""
    task_loss = outputs.get("task_loss") if isinstance(outputs, dict) else None
    return 0.0 if task_loss is None else (outputs["loss"] - task_loss).mean()


def _count(batch: Mapping[str, Any], ids: str, embeddings: str, mask_name: str) -> Tensor | None:
    tokens, mask = batch.get(ids), batch.get(mask_name)
    if tokens is None and batch.get(embeddings) is not None:
        tokens = batch[embeddings][..., 0]
    if tokens is None:
        return None
    if mask is not None and mask.shape == tokens.shape:  # one of pairs tells nothing of tokens
        return mask.bool().sum()
    return torch.full((), tokens.numel(), dtype=torch.long, device=tokens.device)


def _are_tokens(labels: Tensor | None) -> TypeGuard[Tensor]:
    return labels is not None and labels.ndim == 2 and not labels.is_floating_point()
