"""Gated BERT: transformers' BERT with mixtures of heads, expert feed-forward layers and CCT.

With the default configuration it is BERT: same function, same state-dict keys. This file shows what
is particular to BERT as a model: embeddings in, masks, cache and heads. Its layers are in
`layers.py`.
"""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.models.bert.modeling_bert import BertPreTrainedModel
from transformers.utils.generic import TransformersKwargs, can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from ..cache.naming import CACHE_NAME, takes_cache_by_any_name
from ..core.budget_groups import in_groups_of_budgets
from ..core.gated_model import GatedModel
from ..core.heads import (
    QuestionAnswering,
    SequenceClassification,
    TaskHead,
    TokenClassification,
    output_of,
)
from ..core.masks import cross_masks, padding_mask_of, self_mask
from ..core.one_token import OneToken, may_compute_one_token
from ..core.outputs import (
    MoaMaskedLMOutput,
    MoaModelOutput,
    MoaMultipleChoiceOutput,
    MoaTokenClassifierOutput,
)
from ..core.task_losses import labelled_only, token_loss, token_share
from ..core.totals import Call, gating_totals
from ..mae.gate_phase import only_gates_learn_in_gate_phase
from .configuration import MoaBertConfig
from .embeddings import MoaBertEmbeddings
from .heads import MoaBertDiscriminator, MoaBertMLMHead, MoaBertPooler
from .layers import MoaBertEncoder, MoaBertLayer, MoaBertSelfAttention


class MoaBertPreTrainedModel(GatedModel, BertPreTrainedModel):
    """Base class of the gated BERT models: initialisation, loading and saving, the gates' switches."""

    config_class = MoaBertConfig
    base_model_prefix = "bert"
    _no_split_modules = ("MoaBertEmbeddings", "MoaBertLayer")  # type: ignore[assignment]  # made a set
    _can_record_outputs = {  # noqa: RUF012 - read by transformers as it stands
        "hidden_states": MoaBertLayer,
        "attentions": OutputRecorder(MoaBertSelfAttention, index=1, layer_name="attention"),
        "cross_attentions": OutputRecorder(MoaBertSelfAttention, index=1, layer_name="crossattention"),
    }


class MoaBertModel(MoaBertPreTrainedModel):
    """The gated BERT encoder, or decoder with `is_decoder=True`.

    Args:
        config: a `MoaBertConfig`.
        add_pooling_layer: whether the output has a `pooler_output`. Default: as BERT's and RoBERTa's;
            models whose `pooler_act` is another have none, as ELECTRA's and DistilBERT's.
    """

    def __init__(self, config: MoaBertConfig, add_pooling_layer: bool | None = None):
        super().__init__(config)
        if add_pooling_layer is None:
            add_pooling_layer = config.pooler_act == "tanh"
        self.gradient_checkpointing = False
        self.embeddings = MoaBertEmbeddings(config)
        self.cct = self._make_budget_control()
        self.encoder = MoaBertEncoder(config)
        self.pooler = MoaBertPooler(config) if add_pooling_layer else None
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings.word_embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embeddings.word_embeddings = value  # type: ignore[assignment]  # of any kind

    @takes_cache_by_any_name
    @only_gates_learn_in_gate_phase
    @in_groups_of_budgets
    @merge_with_config_defaults
    @capture_outputs
    def forward(  # type: ignore[misc]
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        use_cache: bool | None = None,
        budget: float | Tensor | None = None,
        last_layer_token: int | Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MoaModelOutput:
        """transformers' BERT arguments, and:

        Args:
            attention_mask: `[B, T]`, 1 for real tokens; gates leave the others out. A mask `[B, 1,
                T, T]` rules attention only: gates then count every token. A sequence of zeros is
                allowed: its outputs mean nothing, and it changes no other's.
            budget: CCT's compute budget, a number of `config.cct_budgets` or a tensor `[B]` of such.
                Default: what `set_budget` chose (in training too); else drawn for each sequence in
                training, and the largest in eval.
            last_layer_token: position of the only token that the last layer computes, a number or `[B]`
                int64: `last_hidden_state` is then its, `[B, 1, d]`, and what is reported of that layer
                is of this token. Default: all tokens.

        Returns:
            transformers' output with the fields of `hf_moa.modeling.core.outputs.GatingOutput`.

        Raises:
            ValueError: not exactly one of `input_ids` and `inputs_embeds`; a sequence longer than the
                model's positions; a budget that the model does not know; a budget without
                CCT; a `last_layer_token` that is no position, or in cross-attention.
        """
        requested = self._requested_gating(kwargs)
        tokens = inputs_embeds if input_ids is None else input_ids
        if tokens is None or (input_ids is not None and inputs_embeds is not None):
            raise ValueError("Give exactly one of input_ids and inputs_embeds.")
        others = {"past_key_values": cache, "encoder_hidden_states": encoder_hidden_states}
        token = OneToken.of(last_layer_token, tokens, others)
        cache = self._cache(cache, use_cache, encoder_hidden_states)
        past_length = 0 if cache is None else cache.get_seq_length()
        if position_ids is None:
            self._check_length(past_length + tokens.shape[1])
        choice = self._resolve_budget(tokens, budget)
        hidden_states = self.embeddings(
            input_ids=input_ids,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            past_key_values_length=past_length,
            control_symbol=None if choice is None else choice.embedding,
        )
        cross_mask, encoder_padding_mask = cross_masks(
            self.config, hidden_states, encoder_hidden_states, encoder_attention_mask
        )
        hidden_states, records = self.encoder(
            hidden_states,
            self_mask(self.config, hidden_states, attention_mask, cache),
            encoder_hidden_states,
            encoder_attention_mask=cross_mask,
            **{CACHE_NAME: cache},  # as gradient checkpointing looks for it
            padding_mask=padding_mask_of(attention_mask, tokens.shape[1], past_length),
            encoder_padding_mask=encoder_padding_mask,
            budget=choice,
            token=token,
            **kwargs,
        )
        held: dict[str, Any] = {CACHE_NAME: cache if use_cache else None}
        totals = gating_totals(records, Call(self.config, requested, choice, self.budget_control))
        hidden_states = self._carried(hidden_states, totals)
        return MoaModelOutput(
            last_hidden_state=hidden_states,
            pooler_output=None if self.pooler is None else self.pooler(hidden_states),
            **held,
            **totals,
        )

    def _cache(
        self,
        cache: Cache | None,
        use_cache: bool | None,
        encoder_hidden_states: Tensor | None,
    ) -> Cache | None:
        if cache is not None:
            return cache
        if not (self.config.is_decoder and use_cache):
            return None
        cache = DynamicCache(config=self.config)
        if encoder_hidden_states is None:
            return cache
        return EncoderDecoderCache(cache, DynamicCache(config=self.config))

    def _check_length(self, length: int) -> None:
        limit = self.config.max_tokens
        if length > limit:
            raise ValueError(
                f"The sequence must be at most {limit} tokens long, as max_position_embeddings="
                f"{self.config.max_position_embeddings} has it (got {length}). Truncate it in the "
                f"tokenizer: truncation=True, max_length={limit}."
            )


class MoaBertForMaskedLM(MoaBertPreTrainedModel):
    """Gated BERT with a masked language modelling head."""

    _tp_plan = dict.fromkeys(  # each process has a part of the vocabulary
        ("cls.predictions.decoder", "cls.predictions.bias"), "colwise_gather_output"
    )
    _tied_weights_keys = {  # noqa: RUF012
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    }

    def __init__(self, config: MoaBertConfig):
        super().__init__(config)
        self.bert = MoaBertModel(config, add_pooling_layer=False)
        self.cls = MoaBertMLMHead(config)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.cls.predictions.decoder

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        self.cls.predictions.decoder = new_embeddings
        self.cls.predictions.bias = new_embeddings.bias

    @only_gates_learn_in_gate_phase
    @can_return_tuple
    def forward(  # type: ignore[misc]
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        budget: float | Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MoaMaskedLMOutput:
        """See `MoaBertModel.forward`, and:

        Args:
            labels: `[B, T]` int64, the masked tokens; -100 elsewhere.
            num_items_in_batch: labelled tokens of the whole accumulated batch, as `Trainer` gives it.

        Returns:
            `logits` `[B, T, V]`; in training with labels and `config.sparse_prediction`, `[n, V]` of the
            n labelled tokens, sequence after sequence.
        """
        outputs = self.bert(
            input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            encoder_hidden_states=encoder_hidden_states,
            encoder_attention_mask=encoder_attention_mask,
            budget=budget,
            return_dict=True,
            **kwargs,
        )
        hidden_states = outputs.last_hidden_state
        if self.config.sparse_prediction and self.training and labels is not None:
            hidden_states, labels = labelled_only(hidden_states, labels)
        logits = self.cls(hidden_states)
        loss = None
        if labels is not None:
            loss = token_loss(logits, labels, num_items_in_batch=num_items_in_batch)
        share = token_share(labels, num_items_in_batch)
        return output_of(self, MoaMaskedLMOutput, outputs, loss, share, logits=logits)


_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids", "inputs_embeds")


class MoaBertForSequenceClassification(SequenceClassification, MoaBertPreTrainedModel):
    """Gated BERT with a classifier (or regressor) on the pooled output."""

    head_inputs = _INPUTS
    reads_one_token = True

    def __init__(self, config: MoaBertConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.bert = MoaBertModel(config, add_pooling_layer=True)
        self.dropout = nn.Dropout(_classifier_dropout(config))
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)  # type: ignore[arg-type]  # a number
        self.post_init()

    def only_token_read(self, inputs: dict[str, Any]) -> dict[str, int]:
        return {"last_layer_token": 0}

    def pooled_logits(self, outputs: MoaModelOutput, inputs: dict[str, Any]) -> Tensor:
        return self.classifier(self.dropout(outputs.pooler_output))


class MoaBertForTokenClassification(TokenClassification, MoaBertPreTrainedModel):
    """Gated BERT with a classifier on each token."""

    head_inputs = _INPUTS

    def __init__(self, config: MoaBertConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.bert = MoaBertModel(config, add_pooling_layer=False)
        self.dropout = nn.Dropout(_classifier_dropout(config))
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)  # type: ignore[arg-type]  # a number
        self.post_init()


class MoaBertForReplacedTokenDetection(TaskHead, MoaBertPreTrainedModel):
    """Gated BERT with ELECTRA's discriminator: which tokens were replaced (Clark et al. 2020)."""

    accepts_loss_kwargs = False  # the loss is a mean over the batch's tokens
    head_inputs = _INPUTS
    output_class = MoaTokenClassifierOutput

    def __init__(self, config: MoaBertConfig):
        super().__init__(config)
        self.bert = MoaBertModel(config, add_pooling_layer=False)
        self.discriminator = MoaBertDiscriminator(config)
        self.post_init()

    @only_gates_learn_in_gate_phase
    @can_return_tuple
    def forward(self, *, labels: Tensor | None = None, **inputs: Any) -> MoaTokenClassifierOutput:
        """See `MoaBertModel.forward`, and:

        Args:
            labels: `[B, T]`, 1 for replaced tokens and 0 for the others; those that `attention_mask`
                leaves out do not count.

        Returns:
            `logits` `[B, T]`, above 0 for replaced tokens.
        """
        outputs = self.base_outputs(**inputs)
        logits = self.discriminator(outputs.last_hidden_state)
        loss = None
        if labels is not None:
            mask = inputs.get("attention_mask")
            is_real = torch.ones_like(logits) if mask is None else mask
            loss = nn.functional.binary_cross_entropy_with_logits(
                logits, labels.to(logits.dtype), is_real.to(logits.dtype), reduction="sum"
            )
            loss = loss / is_real.sum()
        return self.head_output(outputs, loss, logits=logits)


class MoaBertForQuestionAnswering(QuestionAnswering, MoaBertPreTrainedModel):
    """Gated BERT with a span classifier: start and end of the answer."""

    head_inputs = _INPUTS

    def __init__(self, config: MoaBertConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.bert = MoaBertModel(config, add_pooling_layer=False)
        self.qa_outputs = nn.Linear(config.hidden_size, config.num_labels)  # type: ignore[arg-type]  # a number
        self.post_init()


class MoaBertForMultipleChoice(MoaBertPreTrainedModel):
    """Gated BERT with a score for each of several choices."""

    accepts_loss_kwargs = False  # the loss is a mean over examples
    reads_one_token = True

    def __init__(self, config: MoaBertConfig):
        super().__init__(config)
        self.bert = MoaBertModel(config, add_pooling_layer=True)
        self.dropout = nn.Dropout(_classifier_dropout(config))
        self.classifier = nn.Linear(config.hidden_size, 1)
        self.post_init()

    def _run_to_count(self, tokens: Tensor) -> None:
        self(input_ids=tokens.unsqueeze(1))  # of one choice

    @only_gates_learn_in_gate_phase
    @can_return_tuple
    def forward(  # type: ignore[misc]
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        budget: float | Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MoaMultipleChoiceOutput:
        """See `MoaBertModel.forward`, and:

        Args:
            input_ids: `[B, choices, T]`, and so every other input of the base model. Gating outputs
                count each choice as a sequence: `[B * choices, ...]`.
            labels: `[B]` int64, the right choice.
            budget: a number, or a tensor `[B]`: all choices of an example have the same.
        """
        tokens: Any = inputs_embeds if input_ids is None else input_ids
        num_choices = tokens.shape[1]
        if isinstance(budget, Tensor) and budget.ndim > 0:
            budget = budget.repeat_interleave(num_choices)
        if may_compute_one_token(self, kwargs):
            kwargs["last_layer_token"] = 0
        outputs = self.bert(
            _merge_choices(input_ids),
            attention_mask=_merge_choices(attention_mask),
            token_type_ids=_merge_choices(token_type_ids),
            position_ids=_merge_choices(position_ids),
            inputs_embeds=_merge_choices(inputs_embeds),
            budget=budget,
            return_dict=True,
            **kwargs,
        )
        # shape: (B * choices, 1) -> (B, choices)
        logits = self.classifier(self.dropout(outputs.pooler_output)).view(-1, num_choices)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return output_of(self, MoaMultipleChoiceOutput, outputs, loss, logits=logits)


def _classifier_dropout(config: MoaBertConfig) -> float:
    dropout = config.classifier_dropout
    return config.hidden_dropout_prob if dropout is None else dropout


def _merge_choices(x: Tensor | None) -> Tensor | None:
    """`[B, choices, ...]` -> `[B * choices, ...]`."""
    return None if x is None else x.flatten(0, 1)
