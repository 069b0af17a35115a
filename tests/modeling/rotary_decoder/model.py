"""Gated Llama: embeddings in, masks, rotations, cache and heads."""

from __future__ import annotations

import torch
from torch import nn
from transformers.cache_utils import DynamicCache
from transformers.masking_utils import create_causal_mask
from transformers.models.llama.modeling_llama import (
    LlamaPreTrainedModel,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from hf_moa.modeling.cache.naming import CACHE_NAME, takes_cache_by_any_name
from hf_moa.modeling.core.budget_groups import in_groups_of_budgets
from hf_moa.modeling.core.budgets import layers_at
from hf_moa.modeling.core.gated_model import GatedModel
from hf_moa.modeling.core.generation import GatedGenerationMixin
from hf_moa.modeling.core.heads import (
    LastTokenClassification,
    QuestionAnswering,
    TokenClassification,
    output_of,
)
from hf_moa.modeling.core.masks import padding_mask_of
from hf_moa.modeling.core.outputs import MoaBaseModelOutput, MoaCausalLMOutput
from hf_moa.modeling.core.task_losses import next_token_labels, token_loss, token_share
from hf_moa.modeling.core.totals import Call, gating_totals
from hf_moa.modeling.mae.gate_phase import only_gates_learn_in_gate_phase

from .configuration import MoaLlamaConfig
from .layers import MoaLlamaAttention, MoaLlamaDecoderLayer


class MoaLlamaPreTrainedModel(GatedModel, LlamaPreTrainedModel):
    config_class = MoaLlamaConfig
    _no_split_modules = ("MoaLlamaDecoderLayer",)
    _can_record_outputs = {  # noqa: RUF012 - read by transformers as it stands
        "hidden_states": MoaLlamaDecoderLayer,
        "attentions": OutputRecorder(MoaLlamaAttention, index=1),
    }


class MoaLlamaModel(MoaLlamaPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.gradient_checkpointing = False
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.cct = self._make_budget_control()
        self.layers = nn.ModuleList(
            MoaLlamaDecoderLayer(config, i) for i in range(config.num_hidden_layers)
        )
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.post_init()

    @takes_cache_by_any_name
    @only_gates_learn_in_gate_phase
    @in_groups_of_budgets
    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids=None,
        cache=None,
        attention_mask=None,
        position_ids=None,
        inputs_embeds=None,
        use_cache=None,
        budget=None,
        padding_mask=None,
        **kwargs,
    ):
        requested = self._requested_gating(kwargs)
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        past = 0 if cache is None else cache.get_seq_length()
        if position_ids is None:
            position_ids = (torch.arange(x.shape[1], device=x.device) + past)[None]
        if padding_mask is None:
            padding_mask = padding_mask_of(attention_mask, x.shape[1], past)
        mask = create_causal_mask(self.config, x, attention_mask, cache, position_ids)
        budgets = self._resolve_budget(x, budget)
        if budgets is not None and budgets.embedding is not None:
            x = x + budgets.embedding
        rotations = self.rotary_emb(x, position_ids=position_ids)
        records = []
        for layer in layers_at(self.layers, budgets):
            x, record = layer(
                x,
                mask,
                padding_mask=padding_mask,
                budget=budgets,
                position_embeddings=rotations,
                position_ids=position_ids,
                **{CACHE_NAME: cache},
                **kwargs,
            )
            records.append(record)
        totals = gating_totals(records, Call(self.config, requested, budgets, self.budget_control))
        return MoaBaseModelOutput(
            last_hidden_state=self.norm(self._carried(x, totals)),
            **{CACHE_NAME: cache if use_cache else None},
            **totals,
        )


class MoaLlamaForCausalLM(MoaLlamaPreTrainedModel, GatedGenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    _tp_plan = {"lm_head": "colwise_gather_output"}  # noqa: RUF012

    def __init__(self, config):
        super().__init__(config)
        self.model = MoaLlamaModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @takes_cache_by_any_name
    @only_gates_learn_in_gate_phase
    @can_return_tuple
    def forward(
        self,
        input_ids=None,
        cache=None,
        attention_mask=None,
        position_ids=None,
        inputs_embeds=None,
        labels=None,
        use_cache=None,
        logits_to_keep=0,
        budget=None,
        num_items_in_batch=None,
        **kwargs,
    ):
        outputs = self.model(
            input_ids,
            cache=cache,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            budget=budget,
            return_dict=True,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss, share = None, 1.0
        if labels is not None:
            targets = next_token_labels(labels)
            loss = token_loss(logits, targets, num_items_in_batch=num_items_in_batch)
            share = token_share(targets, num_items_in_batch)
        return output_of(self, MoaCausalLMOutput, outputs, loss, share, logits=logits)


_INPUTS = ("input_ids", "cache", "attention_mask", "position_ids", "inputs_embeds")


class MoaLlamaForSequenceClassification(LastTokenClassification, MoaLlamaPreTrainedModel):
    head_inputs = _INPUTS

    def __init__(self, config):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = MoaLlamaModel(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()


class MoaLlamaForTokenClassification(TokenClassification, MoaLlamaPreTrainedModel):
    head_inputs = _INPUTS

    def __init__(self, config):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = MoaLlamaModel(config)
        self.dropout = nn.Dropout(0.1)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()


class MoaLlamaForQuestionAnswering(QuestionAnswering, MoaLlamaPreTrainedModel):
    head_inputs = _INPUTS

    def __init__(self, config):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = MoaLlamaModel(config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()
