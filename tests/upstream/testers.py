"""Tiny models and their inputs, in the form that transformers' test mixins ask for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from families import BERT, CASES, GPT2, T5, Case, Family

# Gating fields of each variant; "plain" is transformers' own classes, what the others are held against.
VARIANTS = {
    "plain": {},
    "mha": {},
    "mae": {"attention_type": "mae"},
    "moa": {"attention_type": "moa", "num_attention_experts": 6},
    "cct": {"cct_budgets": [1, 0.5]},
    "moe": {"ffn_type": "moe", "num_ffn_experts": 4},
}


@dataclass(frozen=True)
class Suite:
    """Classes of one family that take the same inputs, the language model among them named."""

    name: str
    family: Family
    class_names: tuple[str, ...]
    language_model: str | None = None
    lengths: tuple[int, int] | None = None  # of encoder and decoder, where there are two
    is_training: bool = True

    @property
    def is_encoder_decoder(self) -> bool:
        return self.lengths is not None

    @property
    def cases(self) -> list[Case]:
        return [case for case in CASES if case.plain_name in self.class_names]

    def classes(self, variant: str) -> tuple[type, ...]:
        """Those of a variant, the base model first."""
        cases = sorted(self.cases, key=lambda case: self.class_names.index(case.plain_name))
        return tuple(case.plain if variant == "plain" else case.gated for case in cases)

    def title(self, variant: str) -> str:
        """Name of the test class."""
        return f"{self.name}{variant.capitalize()}Test"


SUITES = (
    Suite(
        "Bert",
        BERT,
        (
            "BertModel",
            "BertForMaskedLM",
            "BertForSequenceClassification",
            "BertForTokenClassification",
            "BertForQuestionAnswering",
            "BertForMultipleChoice",
        ),
    ),
    Suite(
        "GPT2",
        GPT2,
        (
            "GPT2Model",
            "GPT2LMHeadModel",
            "GPT2ForSequenceClassification",
            "GPT2ForTokenClassification",
            "GPT2ForQuestionAnswering",
        ),
        language_model="GPT2LMHeadModel",
    ),
    Suite("T5", T5, ("T5Model", "T5ForConditionalGeneration"), lengths=(7, 7)),
    # transformers' classifier finds the decoder's end token where the encoder's is: lengths must agree
    Suite("T5Heads", T5, ("T5ForSequenceClassification", "T5ForQuestionAnswering"), lengths=(7, 7)),
    Suite("T5Encoder", T5, ("T5EncoderModel",), is_training=False),
    Suite("T5Token", T5, ("T5ForTokenClassification",)),
)


class Tester:
    """What the mixins know as `model_tester`: sizes, a configuration, and inputs that suit it."""

    batch_size = 8  # what the comparison of attention implementations needs at least, and one
    seq_length = 7
    num_choices = 2
    vocab_size = 99
    hidden_size = 32
    num_hidden_layers = 2
    num_attention_heads = 4

    def __init__(self, suite: Suite, variant: str):
        self.suite = suite
        self.variant = variant
        self.causal_lm_class = None
        if suite.language_model:
            names = [suite.language_model, f"Moa{suite.language_model}"]
            self.causal_lm_class = next(c for c in suite.classes(variant) if c.__name__ in names)
        self.is_training = suite.is_training
        if suite.is_encoder_decoder:
            self.encoder_seq_length, self.decoder_seq_length = suite.lengths
            self.seq_length = self.decoder_seq_length  # of labels

    @property
    def config_class(self) -> type:
        family = self.suite.family
        return family.plain_config_class if self.variant == "plain" else family.config_class

    @property
    def fields(self) -> dict[str, Any]:
        sizes = {"vocab_size": self.vocab_size}
        if self.suite.family is GPT2:
            # the mixins train on 64 tokens, of which 0 and 1 may be any
            sizes |= {"n_positions": 128, "bos_token_id": 98, "eos_token_id": 98, "pad_token_id": 98}
        if self.suite.family is T5:
            sizes["is_encoder_decoder"] = self.suite.is_encoder_decoder
        return self.suite.family.tiny | sizes | VARIANTS[self.variant]

    def get_config(self):
        return self.config_class(**self.fields)

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        from tests.test_modeling_common import ids_tensor, random_attention_mask

        shape = [self.batch_size, getattr(self, "encoder_seq_length", self.seq_length)]
        inputs = {"input_ids": ids_tensor(shape, self.vocab_size - 2) + 1}
        inputs["attention_mask"] = random_attention_mask(shape)
        if self.suite.family is BERT:
            inputs["token_type_ids"] = ids_tensor(shape, 2)
        if self.suite.family is T5:
            inputs["input_ids"] = inputs["input_ids"].clamp(min=2)
            inputs["input_ids"][:, -1] = 1  # the classifier reads the end token
        if self.suite.is_encoder_decoder:
            shape = [self.batch_size, self.decoder_seq_length]
            inputs["decoder_input_ids"] = ids_tensor(shape, self.vocab_size - 2).clamp(min=2)
            inputs["decoder_input_ids"][:, -1] = 1
            inputs["decoder_attention_mask"] = random_attention_mask(shape)
        return self.get_config(), inputs
