"""T5's encoder and decoder, gated, and how they run together.

`MoaT5Stack` is one half; `MoaT5EncoderDecoder` is what every model with both halves shares.
"""

from __future__ import annotations

import copy
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.t5.modeling_t5 import T5LayerNorm, T5PreTrainedModel
from transformers.utils import ModelOutput
from transformers.utils.generic import TransformersKwargs, merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from ..cache.naming import CACHE_NAME, takes_cache_by_any_name
from ..core.budget_groups import in_groups_of_budgets
from ..core.budgets import layers_at
from ..core.gated_model import GatedModel
from ..core.initialization import InitScales
from ..core.masks import cross_masks, padding_mask_of, self_mask
from ..core.outputs import MoaBaseModelOutput, MoaSeq2SeqModelOutput, merge_gating
from ..core.slots import GATINGS
from ..core.totals import Call, gating_totals
from ..mae.gate_phase import only_gates_learn_in_gate_phase
from .configuration import MoaT5Config
from .layers import MoaT5Attention, MoaT5Block


class MoaT5PreTrainedModel(GatedModel, T5PreTrainedModel):
    """Base class of the gated T5 models: initialisation, loading and saving, the gates' switches."""

    config_class = MoaT5Config
    _no_split_modules = ("MoaT5Block",)  # type: ignore[assignment]  # made a set
    # The last projection of a feed-forward layer overflows float16; `down` is that of CCT's parts, and
    # `down_proj` of experts.
    _keep_in_fp32_modules = ("wo", "down.weight", "down_proj")  # type: ignore[assignment]  # made a set
    _can_record_outputs = {  # noqa: RUF012 - read by transformers as it stands
        "hidden_states": OutputRecorder(MoaT5Block, index=0),
        "attentions": OutputRecorder(MoaT5Attention, index=1, layer_name="SelfAttention"),
        "cross_attentions": OutputRecorder(MoaT5Attention, index=1, layer_name="EncDecAttention"),
    }

    def set_budget(self, budget: Any) -> None:
        """Use this compute budget wherever a call names none; None goes back to the default.

        Args:
            budget: a number for both halves, or a pair `(encoder, decoder)`.

        Raises:
            ValueError: a budget is given, and the model has no CCT, or not this one in its list.
        """
        for module in self.modules():
            if isinstance(module, MoaT5EncoderDecoder) and module.budgets is not None:
                module.budgets.choose(budget)
        super().set_budget(budget)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        factor, d = self.config.initializer_factor, self.config.d_model
        if getattr(module, "gate_kind", None) is not None:
            gate: Any = module
            # transformers' default for T5 is a standard deviation of 1, which saturates a gate
            for name, linear in module.named_children():
                if isinstance(linear, nn.Linear) and name not in gate.neutral_layers:
                    init.normal_(linear.weight, std=0.02 * factor)
        if isinstance(module, MoaT5Attention):
            scales = self._init_scales()
            stds = {"q": scales.query, "k": factor * d**-0.5, "v": factor * d**-0.5, "o": scales.output}
            for name, std in stds.items():  # in T5's order, for equal numbers under one seed
                if isinstance(getattr(module, name), nn.Linear):  # experts initialise themselves
                    init.normal_(getattr(module, name).weight, std=std)
            if module.has_relative_attention_bias:
                init.normal_(module.relative_attention_bias.weight, std=factor * d**-0.5)
        elif isinstance(module, MoaT5PreTrainedModel):
            model: Any = module
            if hasattr(module, "shared"):
                init.normal_(model.shared.weight, std=factor)
            if hasattr(module, "lm_head") and not self.config.tie_word_embeddings:
                init.normal_(model.lm_head.weight, std=factor)
            if hasattr(module, "qa_outputs"):
                init.normal_(model.qa_outputs.weight, std=factor * d**-0.5)
                init.zeros_(model.qa_outputs.bias)
            if hasattr(module, "classifier"):
                init.normal_(model.classifier.weight, std=factor)
                init.zeros_(model.classifier.bias)

    def _init_scales(self) -> InitScales:
        config, factor = self.config, self.config.initializer_factor
        return InitScales(
            query=factor * (config.d_model * config.d_kv) ** -0.5,
            output=factor * (config.num_heads * config.d_kv) ** -0.5,
            up=factor * config.d_model**-0.5,
            down=factor * config.d_ff**-0.5,
            num_heads=config.num_heads,
        )


class MoaT5Stack(MoaT5PreTrainedModel):
    """The gated encoder, or with `config.is_decoder` the gated decoder."""

    embed_tokens: nn.Module

    def __init__(self, config: MoaT5Config):
        super().__init__(config)
        self.gradient_checkpointing = False
        self.embed_tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.cct = self._make_budget_control()
        self.block = nn.ModuleList(
            MoaT5Block(config, layer_idx=layer_idx) for layer_idx in range(config.num_layers)
        )
        self.final_layer_norm = T5LayerNorm(config.d_model, eps=config.layer_norm_epsilon)
        self.dropout = nn.Dropout(config.dropout_rate)
        self.post_init()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embed_tokens = value

    @takes_cache_by_any_name
    @only_gates_learn_in_gate_phase
    @in_groups_of_budgets
    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        cache: Cache | None = None,
        use_cache: bool | None = None,
        budget: Any = None,
        padding_mask: Tensor | None = None,
        loss_config: MoaT5Config | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MoaBaseModelOutput:
        """transformers' T5Stack arguments, and:

        Args:
            attention_mask: `[B, past + T]`, 1 for real tokens; gates leave the others out.
            budget: CCT's compute budget: a number, a tensor `[B]`, or in an encoder-decoder model a
                pair, of which the stack takes its half. Default: what `set_budget` chose (in training
                too); else drawn for each sequence in training, and the largest in eval.
            padding_mask: `[B, T]` bool, the real ones of these tokens. Default: what `attention_mask`
                says.
            loss_config: has the coefficients of the auxiliary losses. Default: the stack's own, which in
                an encoder-decoder model is a copy of the model's.

        Raises:
            ValueError: not exactly one of `input_ids` and `inputs_embeds`; `use_cache` in an encoder;
                a budget that the model does not know; a budget without CCT.
        """
        requested = self._requested_gating(kwargs)
        if (input_ids is None) == (inputs_embeds is None):
            half = "decoder_" if self.config.is_decoder else ""
            raise ValueError(f"Give exactly one of {half}input_ids and {half}inputs_embeds.")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        length = inputs_embeds.shape[1]
        cache = self._cache(cache, use_cache)
        if padding_mask is None:
            past = 0 if cache is None else cache.get_seq_length()
            padding_mask = padding_mask_of(attention_mask, length, past)
        budgets = self._resolve_budget(inputs_embeds, budget)
        hidden_states = inputs_embeds
        if budgets is not None and budgets.embedding is not None:
            hidden_states = hidden_states + budgets.embedding
        hidden_states = self.dropout(hidden_states)
        source = encoder_hidden_states if self.config.is_decoder else None
        cross_mask, encoder_padding_mask = cross_masks(
            self.config, inputs_embeds, source, encoder_attention_mask
        )
        seen = self_mask(self.config, inputs_embeds, attention_mask, cache)
        position_bias, records = None, []
        for block in layers_at(self.block, budgets):
            hidden_states, record, position_bias = block(
                hidden_states,
                seen,
                position_bias,  # positional, with the next: for reentrant gradient checkpointing
                encoder_hidden_states,
                encoder_attention_mask=cross_mask,
                **{CACHE_NAME: cache},  # as gradient checkpointing looks for it
                padding_mask=padding_mask,
                encoder_padding_mask=encoder_padding_mask,
                budget=budgets,
                **kwargs,
            )
            records.append(record)
        held: dict[str, Any] = {CACHE_NAME: cache}
        call = Call(loss_config or self.config, requested, budgets, self.budget_control)
        totals = gating_totals(records, call)
        hidden_states = self._carried(hidden_states, totals)
        return MoaBaseModelOutput(
            last_hidden_state=self.dropout(self.final_layer_norm(hidden_states)),
            **held,
            **totals,
        )

    def _cache(self, cache: Cache | None, use_cache: bool | None) -> Cache | None:
        if not self.config.is_decoder:
            if use_cache:
                raise ValueError("use_cache is for decoders: an encoder has no cache (got True).")
            return None
        if cache is not None or not use_cache:
            return cache
        cache = DynamicCache(config=self.config)
        if not self.config.is_encoder_decoder:
            return cache
        return EncoderDecoderCache(cache, DynamicCache(config=self.config))


class MoaT5EncoderDecoder(MoaT5PreTrainedModel):
    """What every model with both halves shares: the stacks, their embeddings and their budgets."""

    _keys_to_ignore_on_load_unexpected = (  # type: ignore[assignment]  # made a set
        "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",
    )
    _tied_weights_keys = {  # noqa: RUF012
        "encoder.embed_tokens.weight": "shared.weight",
        "decoder.embed_tokens.weight": "shared.weight",
    }

    shared: nn.Module

    def __init__(self, config: MoaT5Config):
        super().__init__(config)
        self.shared = nn.Embedding(config.vocab_size, config.d_model)
        encoder_config, decoder_config = copy.deepcopy(config), copy.deepcopy(config)
        encoder_config.is_decoder = False
        encoder_config.use_cache = False
        self.encoder = MoaT5Stack(encoder_config)
        decoder_config.is_decoder = True
        decoder_config.num_layers = config.num_decoder_layers  # type: ignore[assignment]  # filled in
        self.decoder = MoaT5Stack(decoder_config)
        gating = GATINGS.of(config)
        self.budgets = None if gating is None else gating.pairs(config)

    def get_input_embeddings(self) -> nn.Module:
        return self.shared

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.shared = value
        self.encoder.set_input_embeddings(value)
        self.decoder.set_input_embeddings(value)

    _has_two_halves = True

    def _run_to_count(  # type: ignore[override]  # of two halves
        self, tokens: Tensor, decoder_tokens: Tensor
    ) -> None:
        self(input_ids=tokens, decoder_input_ids=decoder_tokens)

    def run_stacks(
        self,
        *,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        encoder_outputs: Any = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        decoder_padding_mask: Tensor | None = None,
        cache: Cache | None = None,
        use_cache: bool | None = None,
        budget: Any = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MoaSeq2SeqModelOutput:
        """Encode, unless `encoder_outputs` are given, and decode."""
        requested = {f"output_{name}": on for name, on in self._requested_gating(kwargs).items()}
        shared: dict[str, Any] = {**kwargs, **requested, "return_dict": True, "loss_config": self.config}
        encoded = None  # the budgets that the encoder had
        if encoder_outputs is None:
            tokens = inputs_embeds if input_ids is None else input_ids
        else:
            tokens, encoded = encoder_outputs[0], getattr(encoder_outputs, "budget", None)
        encoder_budget, decoder_budget = self._resolve_budgets(tokens, budget, encoded)
        if encoder_outputs is None:
            encoder_outputs = self.encoder(
                input_ids=input_ids,
                attention_mask=attention_mask,
                inputs_embeds=inputs_embeds,
                budget=encoder_budget,
                **shared,
            )
        elif not isinstance(encoder_outputs, ModelOutput):
            # hidden states and attentions are tuples; what else may follow is no part of T5's
            recorded = [given for given in encoder_outputs[1:3] if isinstance(given, tuple)]
            encoder_outputs = BaseModelOutput(encoder_outputs[0], *recorded)
        decoder_outputs = self.decoder(
            input_ids=decoder_input_ids,
            attention_mask=decoder_attention_mask,
            inputs_embeds=decoder_inputs_embeds,
            cache=cache,
            encoder_hidden_states=encoder_outputs[0],
            encoder_attention_mask=attention_mask,
            padding_mask=decoder_padding_mask,
            use_cache=use_cache,
            budget=decoder_budget,
            **shared,
        )
        return MoaSeq2SeqModelOutput(
            last_hidden_state=decoder_outputs.last_hidden_state,
            decoder_hidden_states=decoder_outputs.hidden_states,
            decoder_attentions=decoder_outputs.attentions,
            cross_attentions=decoder_outputs.cross_attentions,
            encoder_last_hidden_state=encoder_outputs.last_hidden_state,
            encoder_hidden_states=encoder_outputs.hidden_states,
            encoder_attentions=encoder_outputs.attentions,
            **{CACHE_NAME: getattr(decoder_outputs, CACHE_NAME)},
            **merge_gating(encoder_outputs, decoder_outputs),
        )

    def _check_budget(self, budget: Any) -> None:
        """Refuse what `generate` cannot take: the encoder, which runs first, sees only its half."""
        if self.budgets is not None:
            number = budget.shape[0] if isinstance(budget, Tensor) else 1
            self.budgets.resolve(budget, batch_size=number, device=self.device, training=False)

    def _resolve_budgets(
        self, tokens: Tensor | None, budget: Any, encoded: Tensor | None
    ) -> tuple[Any, Any]:
        """The encoder's and the decoder's budget of every sequence; in training, pairs that are drawn
        begin with `encoded` `[B]`, those of an encoder that has run."""
        if self.budgets is None:
            self._refuse_budget(budget)
            return None, None
        if tokens is None:
            raise ValueError("Give exactly one of input_ids and inputs_embeds.")
        return self.budgets.halves(
            budget,
            batch_size=tokens.shape[0],
            device=tokens.device,
            training=self.training,
            controls=(self.encoder.budget_control, self.decoder.budget_control),
            encoded=encoded,
        )
