"""Gated T5: transformers' T5 with mixtures of heads, expert feed-forward layers and CCT.

With the default configuration it is T5: same function, same state-dict keys. Encoder self-attention,
decoder self-attention and cross-attention each have a gate of their own. This file has the models;
the two stacks that they are made of are in `stacks.py`, the layers in `layers.py`.
"""

from __future__ import annotations

import copy
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.models.t5.modeling_t5 import T5ClassificationHead
from transformers.utils.generic import TransformersKwargs, can_return_tuple

from ..cache.naming import takes_cache_by_any_name
from ..core.generation import GatedGenerationMixin
from ..core.heads import QuestionAnswering, SequenceClassification, TokenClassification, output_of
from ..core.masks import padding_mask_of
from ..core.outputs import (
    MoaBaseModelOutput,
    MoaSeq2SeqLMOutput,
    MoaSeq2SeqModelOutput,
    MoaSeq2SeqQuestionAnsweringOutput,
    MoaSeq2SeqSequenceClassifierOutput,
)
from ..core.sharding import FSDPModule, register_fsdp_forward_method
from ..core.task_losses import token_loss, token_share, up_to_last_label
from ..mae.gate_phase import only_gates_learn_in_gate_phase
from .configuration import MoaT5Config
from .stacks import MoaT5EncoderDecoder, MoaT5PreTrainedModel, MoaT5Stack


class MoaT5Model(MoaT5EncoderDecoder):
    """The gated T5: encoder and decoder, without a head."""

    def __init__(self, config: MoaT5Config):
        super().__init__(config)
        self.post_init()

    @takes_cache_by_any_name
    @only_gates_learn_in_gate_phase
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: Any = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        budget: Any = None,
        decoder_padding_mask: Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MoaSeq2SeqModelOutput:
        """transformers' T5 arguments, and:

        Args:
            attention_mask: `[B, S]`, 1 for the encoder's real tokens; gates leave the others out.
            budget: CCT's compute budget: a number for both halves, a pair `(encoder, decoder)`, or a
                tensor `[B]` or `[B, 2]` of such, from `config.cct_budgets`. Default: what `set_budget`
                chose (in training too); else drawn for each sequence in training, and the largest in
                eval.
            decoder_padding_mask: `[B, T]` bool, the decoder's real tokens, only for the gates.
                Default: what `decoder_attention_mask` says.

        Returns:
            transformers' output with the fields of `hf_moa.modeling.core.outputs.GatingSeq2SeqOutput`.

        Raises:
            ValueError: not exactly one of ids and embeddings, for each half; a budget that the model
                does not know; a budget without CCT.
        """
        return self.run_stacks(
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            encoder_outputs=encoder_outputs,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            decoder_inputs_embeds=decoder_inputs_embeds,
            decoder_padding_mask=decoder_padding_mask,
            cache=cache,
            use_cache=use_cache,
            budget=budget,
            **kwargs,
        )


class MoaT5ForConditionalGeneration(MoaT5EncoderDecoder, GatedGenerationMixin):
    """Gated T5 with a language modelling head on the decoder."""

    _tp_plan = {"lm_head": "colwise_gather_output"}  # noqa: RUF012
    _tied_weights_keys = {  # noqa: RUF012
        **MoaT5EncoderDecoder._tied_weights_keys,
        "lm_head.weight": "shared.weight",
    }

    def __init__(self, config: MoaT5Config):
        super().__init__(config)
        self.model_dim = config.d_model
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.post_init()

    def _maybe_prepare_encoder_kwargs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers', which calls the encoder by itself: FSDP then has to gather what the encoder
        shares with the model as a whole."""
        name = "_maybe_prepare_encoder_kwargs_for_generation"
        if isinstance(self, FSDPModule) and name not in vars(self):
            register_fsdp_forward_method(self, name)
            return getattr(self, name)(*args, **kwargs)
        return super()._maybe_prepare_encoder_kwargs_for_generation(*args, **kwargs)  # type: ignore[misc]  # a model

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """Labels `[B, T]`, shifted right behind the start token."""
        return self._shift_right(labels)

    @takes_cache_by_any_name
    @only_gates_learn_in_gate_phase
    @can_return_tuple
    def forward(  # type: ignore[misc]
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: Any = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        budget: Any = None,
        decoder_padding_mask: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MoaSeq2SeqLMOutput:
        """See `MoaT5Model.forward`, and:

        Args:
            labels: `[B, T]` int64; -100 is ignored. Without decoder inputs, they are the labels shifted
                right; positions after the last label then count as padding for the gates.
            num_items_in_batch: labelled tokens of the whole accumulated batch, as `Trainer` gives it.
        """
        if labels is not None:
            if decoder_input_ids is None and decoder_inputs_embeds is None:
                decoder_input_ids = self._shift_right(labels)
            if decoder_attention_mask is None and decoder_padding_mask is None:
                decoder_padding_mask = up_to_last_label(labels)
        outputs = self.run_stacks(
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            encoder_outputs=encoder_outputs,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            decoder_inputs_embeds=decoder_inputs_embeds,
            decoder_padding_mask=decoder_padding_mask,
            cache=cache,
            use_cache=use_cache,
            budget=budget,
            **kwargs,
        )
        hidden_states = outputs.last_hidden_state
        if self.config.scale_decoder_outputs:
            hidden_states = hidden_states * self.model_dim**-0.5
        logits = self.lm_head(hidden_states)
        loss = None
        if labels is not None:
            loss = token_loss(logits, labels, num_items_in_batch=num_items_in_batch)
        share = token_share(labels, num_items_in_batch)
        return output_of(self, MoaSeq2SeqLMOutput, outputs, loss, share, logits=logits)


class MoaT5EncoderModel(MoaT5PreTrainedModel):
    """Only the encoder. It takes a number (or a tensor `[B]`) as budget."""

    _tied_weights_keys = {"encoder.embed_tokens.weight": "shared.weight"}  # noqa: RUF012
    _keys_to_ignore_on_load_unexpected = (r"decoder",)  # type: ignore[assignment]  # made a set

    shared: nn.Module

    def __init__(self, config: MoaT5Config):
        config = _encoder_only(config)
        super().__init__(config)
        self.shared = nn.Embedding(config.vocab_size, config.d_model)
        self.encoder = MoaT5Stack(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.shared

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.shared = value
        self.encoder.set_input_embeddings(value)

    @only_gates_learn_in_gate_phase
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        budget: float | Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MoaBaseModelOutput:
        """transformers' T5EncoderModel arguments, and:

        Args:
            attention_mask: `[B, S]`, 1 for real tokens; gates leave the others out.
            budget: CCT's compute budget: a number of the encoder's, or a tensor `[B]` of such. Default:
                what `set_budget` chose (in training too); else drawn for each sequence in training, and
                the largest in eval.

        Returns:
            transformers' output with the fields of `hf_moa.modeling.core.outputs.GatingOutput`.

        Raises:
            ValueError: not exactly one of ids and embeddings; a budget that the model does not know; a
                budget without CCT.
        """
        return self.encoder(
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            budget=budget,
            **kwargs | {"return_dict": True},
        )


class _ReadsSourceTwice:
    """A head on the decoder, which reads the encoder's ids shifted right where it is given none."""

    head_inputs: ClassVar[tuple[str, ...]] = (
        "input_ids",
        "attention_mask",
        "decoder_input_ids",
        "decoder_attention_mask",
        "encoder_outputs",
        "inputs_embeds",
        "decoder_inputs_embeds",
    )
    inputs_with_labels: ClassVar[dict[str, Any]] = {"use_cache": False}

    def shift_source_right(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The inputs, with those of the decoder.

        Raises:
            ValueError: neither `input_ids` nor decoder inputs.
        """
        given = [inputs.get(f"decoder_{name}") for name in ("input_ids", "inputs_embeds")]
        if any(each is not None for each in given):
            return inputs
        input_ids = inputs.get("input_ids")
        if input_ids is None:
            raise ValueError(
                "Without input_ids, give decoder_input_ids or decoder_inputs_embeds: the decoder "
                "reads the input_ids shifted right."
            )
        model: Any = self  # of T5
        inputs = {**inputs, "decoder_input_ids": model._shift_right(input_ids)}
        masks = [inputs.get(f"decoder_{name}") for name in ("attention_mask", "padding_mask")]
        if all(mask is None for mask in masks):
            mask = padding_mask_of(inputs.get("attention_mask"), input_ids.shape[1])
            inputs["decoder_padding_mask"] = mask
        return inputs


class MoaT5ForSequenceClassification(_ReadsSourceTwice, SequenceClassification, MoaT5PreTrainedModel):
    """Gated T5 with a classifier (or regressor) on the decoder's output at the last end token.

    Its forward needs `input_ids`, in which the end token is found, and raises a ValueError without, or
    for a sequence without `config.eos_token_id`.
    """

    head_inputs = _ReadsSourceTwice.head_inputs
    output_class = MoaSeq2SeqSequenceClassifierOutput
    _keys_to_ignore_on_load_unexpected = MoaT5EncoderDecoder._keys_to_ignore_on_load_unexpected  # type: ignore[assignment]
    _has_two_halves = True

    def __init__(self, config: MoaT5Config):
        super().__init__(config)
        self.transformer = MoaT5Model(config)
        self.classification_head = T5ClassificationHead(config)
        self.post_init()

    def _run_to_count(  # type: ignore[override]  # of two halves
        self, tokens: Tensor, decoder_tokens: Tensor
    ) -> None:
        # where the end token stands is not known
        outputs = self.transformer(input_ids=tokens, decoder_input_ids=decoder_tokens)
        self.classification_head(outputs.last_hidden_state[:, -1])

    def base_outputs(self, **inputs: Any) -> MoaSeq2SeqModelOutput:
        if inputs.get("input_ids") is None:
            raise ValueError(
                f"{type(self).__name__} needs input_ids, to find the end of each sequence "
                "(inputs_embeds do not tell it)."
            )
        return self.transformer(**self.shift_source_right(inputs), return_dict=True)

    def pooled_logits(self, outputs: MoaSeq2SeqModelOutput, inputs: dict[str, Any]) -> Tensor:
        hidden_states: Any = outputs.last_hidden_state
        sequences = torch.arange(hidden_states.shape[0], device=hidden_states.device)
        end = self._last_end(inputs["input_ids"]).to(hidden_states.device)
        return self.classification_head(hidden_states[sequences, end])

    def _last_end(self, input_ids: Tensor) -> Tensor:
        """Position of the last end token of each sequence, `[B]`."""
        end_tokens = torch.tensor(self.config.eos_token_id, device=input_ids.device)  # one or several
        is_end = torch.isin(input_ids, end_tokens)
        if not torch.compiler.is_compiling() and not bool(is_end.any(dim=1).all()):
            missing = (~is_end.any(dim=1)).nonzero().flatten().tolist()
            raise ValueError(
                f"input_ids must hold eos_token_id={self.config.eos_token_id} in every sequence; "
                f"sequences {missing} have none. Tokenizers of T5 add it, and truncation keeps it."
            )
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        return (positions * is_end).argmax(dim=1)


class MoaT5ForTokenClassification(TokenClassification, MoaT5PreTrainedModel):
    """Gated T5 encoder with a classifier on each token."""

    head_inputs = ("input_ids", "attention_mask", "inputs_embeds")

    def __init__(self, config: MoaT5Config):
        config = _encoder_only(config)
        super().__init__(config)
        self.num_labels = config.num_labels
        self.transformer = MoaT5EncoderModel(config)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.classifier = nn.Linear(config.d_model, config.num_labels)  # type: ignore[arg-type]  # a number
        self.post_init()


class MoaT5ForQuestionAnswering(_ReadsSourceTwice, QuestionAnswering, MoaT5EncoderDecoder):
    """Gated T5 with a span classifier on the decoder: start and end of the answer.

    Its forward raises a ValueError without `input_ids` and decoder inputs.
    """

    head_inputs = _ReadsSourceTwice.head_inputs
    output_class = MoaSeq2SeqQuestionAnsweringOutput

    def __init__(self, config: MoaT5Config):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.qa_outputs = nn.Linear(config.d_model, config.num_labels)  # type: ignore[arg-type]  # a number
        self.post_init()

    def base_outputs(self, **inputs: Any) -> MoaSeq2SeqModelOutput:
        return self.run_stacks(**self.shift_source_right(inputs))


def _encoder_only(config: MoaT5Config) -> MoaT5Config:
    """The configuration of only the encoder."""
    if not config.is_encoder_decoder and not config.use_cache:
        return config
    config = copy.deepcopy(config)
    config.use_cache = False
    config.is_encoder_decoder = False
    return config
