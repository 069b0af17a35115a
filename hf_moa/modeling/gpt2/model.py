"""Gated GPT-2: transformers' GPT-2 with mixtures of heads, expert feed-forward layers and CCT.

With the default configuration it is GPT-2: same function, same state-dict keys. This file shows what
is particular to GPT-2 as a model: embeddings in, masks, cache and heads. Its layers are in
`layers.py`.
"""

from __future__ import annotations

import math
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.masking_utils import create_causal_mask
from transformers.models.gpt2.modeling_gpt2 import GPT2PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils.generic import TransformersKwargs, can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from ..attention.packed import refuse_packed_texts
from ..cache.naming import CACHE_NAME, takes_cache_by_any_name
from ..core.budget_groups import in_groups_of_budgets
from ..core.budgets import layers_at
from ..core.gated_model import GatedModel
from ..core.generation import GatedGenerationMixin
from ..core.heads import LastTokenClassification, QuestionAnswering, TokenClassification, output_of
from ..core.initialization import InitScales
from ..core.masks import cross_masks, padding_mask_of
from ..core.one_token import OneToken
from ..core.outputs import MoaBaseModelOutput, MoaCausalLMOutput
from ..core.task_losses import next_token_labels, token_loss, token_share
from ..core.totals import Call, gating_totals
from ..mae.gate_phase import only_gates_learn_in_gate_phase
from .configuration import MoaGPT2Config
from .layers import MoaGPT2Attention, MoaGPT2Block


class MoaGPT2PreTrainedModel(GatedModel, GPT2PreTrainedModel):
    """Base class of the gated GPT-2 models: initialisation, loading and saving, the gates' switches."""

    config_class = MoaGPT2Config
    _no_split_modules = ("MoaGPT2Block",)  # type: ignore[assignment]  # made a set
    _supports_flex_attn = True
    _can_record_outputs = {  # noqa: RUF012 - read by transformers as it stands
        "hidden_states": MoaGPT2Block,
        "attentions": OutputRecorder(MoaGPT2Attention, index=1, layer_name=".attn"),
        "cross_attentions": OutputRecorder(MoaGPT2Attention, index=1, layer_name=".crossattention"),
    }

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, MoaGPT2Attention) and isinstance(module.c_proj, Conv1D):
            init.normal_(module.c_proj.weight, std=self._init_scales().output)

    def _run_to_count(self, tokens: Tensor) -> None:
        # without a mask, transformers looks for padding in the tokens, which have no numbers
        self(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False)

    def _init_scales(self) -> InitScales:
        std = self.config.initializer_range
        # projections into the residual stream start smaller with depth, as GPT-2's do
        small = std / math.sqrt(2 * self.config.n_layer)
        return InitScales(std, small, std, small, self.config.n_head)


class MoaGPT2Model(MoaGPT2PreTrainedModel):
    """The gated GPT-2 decoder.

    Args:
        config: a `MoaGPT2Config`.
    """

    wte: nn.Module

    def __init__(self, config: MoaGPT2Config):
        super().__init__(config)
        self.gradient_checkpointing = False
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.n_positions, config.n_embd)
        self.cct = self._make_budget_control()
        self.drop = nn.Dropout(config.embd_pdrop)
        self.h = nn.ModuleList(MoaGPT2Block(config, layer_idx) for layer_idx in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.wte

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.wte = value

    @takes_cache_by_any_name
    @only_gates_learn_in_gate_phase
    @in_groups_of_budgets
    @merge_with_config_defaults
    @capture_outputs
    def forward(  # type: ignore[misc]
        self,
        input_ids: Tensor | None = None,
        cache: Cache | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        use_cache: bool | None = None,
        budget: float | Tensor | None = None,
        padding_mask: Tensor | None = None,
        last_layer_token: int | Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MoaBaseModelOutput:
        """transformers' GPT-2 arguments, and:

        Args:
            attention_mask: `[B, past + T]`, 1 for real tokens; gates leave the others out. A mask
                `[B, 1, T, S]` rules attention only: gates then count every token, or those that
                `padding_mask` names.
            budget: CCT's compute budget, a number of `config.cct_budgets` or a tensor `[B]` of such.
                Default: what `set_budget` chose (in training too); else drawn for each sequence in
                training, and the largest in eval.
            padding_mask: `[B, T]` bool, the real ones of these tokens. Default: what `attention_mask`
                says.
            last_layer_token: position of the only token that the last layer computes, a number or `[B]`
                int64: `last_hidden_state` is then its, `[B, 1, d]`, and what is reported of that layer
                is of this token. Default: all tokens.

        Returns:
            transformers' output with the fields of `hf_moa.modeling.core.outputs.GatingOutput`.

        Raises:
            ValueError: not exactly one of `input_ids` and `inputs_embeds`; a sequence longer than
                `n_positions`; a budget that the model does not know; a budget without CCT; a
                `last_layer_token` that is no position, or behind a cache, or in cross-attention.
        """
        requested = self._requested_gating(kwargs)
        if input_ids is not None and inputs_embeds is None:
            self.warn_if_padding_and_no_attention_mask(input_ids, attention_mask)
            inputs_embeds = self.wte(input_ids.view(-1, input_ids.shape[-1]))
        elif inputs_embeds is None or input_ids is not None:
            raise ValueError("Give exactly one of input_ids and inputs_embeds.")
        length = inputs_embeds.shape[1]
        others = {"past_key_values": cache, "encoder_hidden_states": encoder_hidden_states}
        token = OneToken.of(last_layer_token, inputs_embeds, others)
        cache = self._cache(cache, use_cache)
        past = 0 if cache is None else cache.get_seq_length()
        if position_ids is None:
            position_ids = self._positions(length, past, inputs_embeds.device)
        elif attention_mask is None and cache is None and self._remembers:
            refuse_packed_texts(position_ids)
        if padding_mask is None:
            padding_mask = padding_mask_of(attention_mask, length, past)
        budgets = self._resolve_budget(inputs_embeds, budget)
        hidden_states = inputs_embeds + self.wpe(position_ids).to(inputs_embeds.device)
        if token_type_ids is not None:
            hidden_states = hidden_states + self.wte(token_type_ids.view(-1, length))
        if budgets is not None and budgets.embedding is not None:
            hidden_states = hidden_states + budgets.embedding
        hidden_states = self.drop(hidden_states)
        causal_mask = create_causal_mask(self.config, inputs_embeds, attention_mask, cache, position_ids)
        cross_mask, encoder_padding_mask = cross_masks(
            self.config, inputs_embeds, encoder_hidden_states, encoder_attention_mask
        )
        records = []
        blocks = layers_at(self.h, budgets)
        for block in blocks:
            hidden_states, record = block(
                hidden_states,
                causal_mask,
                encoder_hidden_states,  # positional, for reentrant gradient checkpointing
                encoder_attention_mask=cross_mask,
                **{CACHE_NAME: cache},  # as gradient checkpointing looks for it
                padding_mask=padding_mask,
                encoder_padding_mask=encoder_padding_mask,
                position_ids=position_ids,
                budget=budgets,
                token=token if block is blocks[-1] else None,
                **kwargs,
            )
            records.append(record)
        held: dict[str, Any] = {CACHE_NAME: cache if use_cache else None}
        totals = gating_totals(records, Call(self.config, requested, budgets, self.budget_control))
        return MoaBaseModelOutput(
            last_hidden_state=self.ln_f(self._carried(hidden_states, totals)),
            **held,
            **totals,
        )

    @property
    def _remembers(self) -> bool:
        """Whether gates need something of earlier tokens."""
        first: Any = self.h[0]
        return first.attn.mixture.remembers

    def _cache(self, cache: Cache | None, use_cache: bool | None) -> Cache | None:
        if not use_cache:
            return cache
        cache = DynamicCache(config=self.config) if cache is None else cache
        if self.config.add_cross_attention and not isinstance(cache, EncoderDecoderCache):
            cache = EncoderDecoderCache(cache, DynamicCache(config=self.config))
        return cache

    def _positions(self, length: int, past: int | Tensor, device: torch.device) -> Tensor:
        limit = self.config.n_positions
        if isinstance(past, int) and past + length > limit:
            raise ValueError(
                f"The sequence must be at most n_positions={limit} tokens long (got {past + length}). "
                f"Truncate it in the tokenizer: truncation=True, max_length={limit}."
            )
        return (torch.arange(length, device=device) + past).unsqueeze(0)


class MoaGPT2LMHeadModel(MoaGPT2PreTrainedModel, GatedGenerationMixin):
    """Gated GPT-2 with a language modelling head, tied to the embeddings."""

    _tp_plan = {"lm_head": "colwise_gather_output"}  # noqa: RUF012
    _tied_weights_keys = {"lm_head.weight": "transformer.wte.weight"}  # noqa: RUF012

    def __init__(self, config: MoaGPT2Config):
        super().__init__(config)
        # `Trainer` counts a batch's labelled tokens by it.
        self.loss_type = "ForCausalLM"
        self.transformer = MoaGPT2Model(config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.post_init()

    @takes_cache_by_any_name
    @only_gates_learn_in_gate_phase
    @can_return_tuple
    def forward(  # type: ignore[misc]
        self,
        input_ids: Tensor | None = None,
        cache: Cache | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        budget: float | Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MoaCausalLMOutput:
        """See `MoaGPT2Model.forward`, and:

        Args:
            labels: `[B, T]` int64, usually `input_ids`; the model shifts them. -100 is ignored.
            logits_to_keep: compute the logits of this many last positions (0: all), or of the
                positions in a 1-D tensor.
            num_items_in_batch: labelled tokens of the whole accumulated batch, as `Trainer` gives it.
            kwargs: among others `shift_labels` `[B, T]`, labels that are shifted already, instead
                of what `labels` give (as `Trainer` hands them out where it splits sequences).
        """
        # no parameter of its own: `Trainer` takes every one with "label" in its name for required
        shift_labels = kwargs.pop("shift_labels", None)
        outputs = self.transformer(
            input_ids,
            cache=cache,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            encoder_hidden_states=encoder_hidden_states,
            encoder_attention_mask=encoder_attention_mask,
            use_cache=use_cache,
            budget=budget,
            return_dict=True,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None
        share: Tensor | float = 1.0
        if labels is not None:
            targets = next_token_labels(labels) if shift_labels is None else shift_labels
            loss = token_loss(logits, targets, num_items_in_batch=num_items_in_batch)
            share = token_share(targets, num_items_in_batch)
        return output_of(self, MoaCausalLMOutput, outputs, loss, share, logits=logits)


_INPUTS = (
    "input_ids",
    "cache",
    "attention_mask",
    "token_type_ids",
    "position_ids",
    "inputs_embeds",
)


class MoaGPT2ForSequenceClassification(LastTokenClassification, MoaGPT2PreTrainedModel):
    """Gated GPT-2 with a classifier (or regressor) on the last token that is not padding.

    Its forward raises a ValueError for several sequences and no `config.pad_token_id` to find their last
    tokens by.
    """

    head_inputs = _INPUTS
    reads_one_token = True

    def __init__(self, config: MoaGPT2Config):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.transformer = MoaGPT2Model(config)
        self.score = nn.Linear(config.n_embd, config.num_labels, bias=False)  # type: ignore[arg-type]  # a number
        self.post_init()

    def only_token_read(self, inputs: dict[str, Any]) -> dict[str, Tensor | int]:
        if inputs.get("input_ids") is inputs.get("inputs_embeds") is None:
            return {}  # which the base model refuses
        return {"last_layer_token": self.last_token(**inputs)}


class MoaGPT2ForTokenClassification(TokenClassification, MoaGPT2PreTrainedModel):
    """Gated GPT-2 with a classifier on each token."""

    head_inputs = _INPUTS

    def __init__(self, config: MoaGPT2Config):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.transformer = MoaGPT2Model(config)
        # GPT-2's configuration has no such field, but its classifier reads one where it is set.
        dropout = getattr(config, "classifier_dropout", None)
        if dropout is None:
            dropout = getattr(config, "hidden_dropout", None)
        self.dropout = nn.Dropout(0.1 if dropout is None else dropout)
        self.classifier = nn.Linear(config.n_embd, config.num_labels)  # type: ignore[arg-type]  # a number
        self.post_init()


class MoaGPT2ForQuestionAnswering(QuestionAnswering, MoaGPT2PreTrainedModel):
    """Gated GPT-2 with a span classifier: start and end of the answer."""

    head_inputs = tuple(name for name in _INPUTS if name != "cache")

    def __init__(self, config: MoaGPT2Config):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.transformer = MoaGPT2Model(config)
        self.qa_outputs = nn.Linear(config.n_embd, 2)
        self.post_init()
