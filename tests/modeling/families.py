"""The three families, tiny: their classes, what they are compared with, and inputs for each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import pytest
import torch
import transformers
from common import TINY, VARIANTS, batch, randomize

import hf_moa


@dataclass(frozen=True)
class Family:
    """A backbone: its configurations, tiny sizes, and the names of its dropouts."""

    name: str
    config_class: type
    plain_config_class: type
    tiny: dict[str, Any]
    no_dropout: dict[str, Any]
    one_layer: dict[str, int]
    own_variants: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def variants(self) -> dict[str, dict[str, Any]]:
        shared = {name: fields for name, fields in VARIANTS.items() if "pre_norm" not in fields}
        return shared | self.own_variants

    def config(self, **fields):
        return self.config_class(**self.tiny | {"num_labels": 3} | fields)


RELATIVE = {
    "embedding_size": 16,
    "type_vocab_size": 0,
    "positions_skip_padding": True,
    "relative_attention_num_buckets": 8,
    "pooler_act": "gelu",
}
BERT = Family(
    name="bert",
    config_class=hf_moa.MoaBertConfig,
    plain_config_class=transformers.BertConfig,
    tiny=TINY,
    no_dropout={
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "mae_gate_dropout": 0.0,
    },
    one_layer={"num_hidden_layers": 1},
    own_variants={
        "mae-pre-norm": VARIANTS["mae-pre-norm"],
        # what RoBERTa, ELECTRA and MPNet have and BERT has not
        "mae-cct-relative": VARIANTS["mae-cct"] | RELATIVE,
    },
)
GPT2 = Family(
    name="gpt2",
    config_class=hf_moa.MoaGPT2Config,
    plain_config_class=transformers.GPT2Config,
    tiny={
        "vocab_size": 67,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_inner": 48,
        "n_positions": 40,
        # as `gelu_new`, in transformers too by the one kernel: outputs can be compared to the bit
        "activation_function": "gelu_pytorch_tanh",
        "bos_token_id": 1,
        "eos_token_id": 1,
        "pad_token_id": 0,
    },
    no_dropout={"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "mae_gate_dropout": 0.0},
    one_layer={"n_layer": 1},
    own_variants={"mae-window-3": {"attention_type": "mae", "mae_gate_window": 3}},
)
T5 = Family(
    name="t5",
    config_class=hf_moa.MoaT5Config,
    plain_config_class=transformers.T5Config,
    tiny={
        "vocab_size": 67,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 2,
        "num_heads": 4,
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 10,
        "decoder_start_token_id": 0,
    },
    no_dropout={"dropout_rate": 0.0, "mae_gate_dropout": 0.0},
    one_layer={"num_layers": 1},
    own_variants={
        "mae-window-3": {"attention_type": "mae", "mae_gate_window": 3},
        "mae-gated-gelu": {"attention_type": "mae", "feed_forward_proj": "gated-gelu"},
        "moe-gated-gelu": {"ffn_type": "moe", "feed_forward_proj": "gated-gelu"},
        "cct-gated-gelu": {"cct_budgets": [1, 0.5], "feed_forward_proj": "gated-gelu"},
        "cct-plain-gated-gelu": {
            "cct_budgets": [[1, 1], [1, 0.5]],
            "cct_sublayer_norm": False,
            "feed_forward_proj": "gated-gelu",
        },
    },
)


@dataclass(frozen=True)
class Case:
    """One class: `Moa` + `plain_name`, and the auto class that knows it."""

    family: Family
    plain_name: str
    auto_name: str

    @property
    def gated(self) -> type:
        return getattr(hf_moa, f"Moa{self.plain_name}")

    @property
    def plain(self) -> type:
        return getattr(transformers, self.plain_name)

    @property
    def auto(self) -> type:
        return getattr(transformers, self.auto_name)

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of a tiny configuration: span classifiers have two labels."""
        return {"num_labels": 2 if self.task == "QuestionAnswering" else 3}

    @property
    def task(self) -> str:
        for task in ("MaskedLM", "LMHead", "ConditionalGeneration", "SequenceClassification",
                     "TokenClassification", "QuestionAnswering", "MultipleChoice"):  # fmt: skip
            if task in self.plain_name:
                return task
        return "none"

    def config(self, **fields):
        return self.family.config(**self.fields | fields)

    def build(self, seed: int = 0, noise: float = 0.3, **fields):
        """A model whose every parameter is away from its initial value, in eval mode."""
        torch.default_generator.manual_seed(seed)
        return randomize(self.gated(self.config(**fields)), seed=seed, scale=noise).eval()

    def build_plain(self, seed: int = 0, **fields):
        torch.default_generator.manual_seed(seed)
        config = self.family.plain_config_class(**self.family.tiny | self.fields | fields)
        return randomize(self.plain(config), seed=seed).eval()

    def inputs(self, **sizes) -> dict[str, torch.Tensor]:
        """A batch with padding on the right."""
        ids, mask = batch(**sizes)
        ids = torch.where(mask.bool(), ids, 0)
        if self.task == "MultipleChoice":
            ids, mask = (x.unsqueeze(1).repeat(1, 2, 1) for x in (ids, mask))
            ids[:, 1] = torch.where(mask[:, 1].bool(), (ids[:, 1] + 7) % 60 + 5, 0)
        if self.plain_name == "T5ForSequenceClassification":  # the end token, once, last
            rows = torch.arange(len(ids))
            ids[rows, mask.sum(dim=1) - 1] = 1
        inputs = {"input_ids": ids, "attention_mask": mask}
        if self.plain_name in ("T5Model", "T5ForConditionalGeneration"):
            inputs["decoder_input_ids"] = batch(**sizes | {"length": 6, "seed": 3})[0]
        return inputs

    def inputs_padded(self, side: str) -> dict[str, torch.Tensor]:
        """The same with padding on the "right" or "left", or without a mask ("none")."""
        inputs = self.inputs()
        if side == "left":
            return inputs | {key: inputs[key].flip(1) for key in ("input_ids", "attention_mask")}
        if side == "none":
            del inputs["attention_mask"]
        return inputs

    def labels(self) -> dict[str, torch.Tensor]:
        if self.task == "none":
            return {}
        if self.task == "LMHead":
            inputs = self.inputs()
            ids, mask = inputs["input_ids"], inputs["attention_mask"]
            return {"labels": torch.where(mask.bool(), ids, -100)}
        if self.task == "ConditionalGeneration":
            labels = batch(length=6, seed=5)[0]
            labels[1, 4:] = -100
            return {"labels": labels}
        if self.task in ("MaskedLM", "TokenClassification"):
            labels = batch(seed=5)[0] % 3
            labels[0, :4] = -100
            return {"labels": labels}
        if self.task == "QuestionAnswering":
            return {
                "start_positions": torch.tensor([1, 2, 0]),
                "end_positions": torch.tensor([2, 4, 1]),
            }
        if self.task == "MultipleChoice":
            return {"labels": torch.tensor([0, 1, 1])}
        return {"labels": torch.tensor([0, 1, 2])}


_HEADS = {
    "ForSequenceClassification": "AutoModelForSequenceClassification",
    "ForTokenClassification": "AutoModelForTokenClassification",
    "ForQuestionAnswering": "AutoModelForQuestionAnswering",
}


def _cases(family: Family, prefix: str, others: dict[str, str]) -> list[Case]:
    return [Case(family, prefix + suffix, auto) for suffix, auto in (others | _HEADS).items()]


CASES = [
    *_cases(
        BERT,
        "Bert",
        {
            "Model": "AutoModel",
            "ForMaskedLM": "AutoModelForMaskedLM",
            "ForMultipleChoice": "AutoModelForMultipleChoice",
        },
    ),
    *_cases(GPT2, "GPT2", {"Model": "AutoModel", "LMHeadModel": "AutoModelForCausalLM"}),
    *_cases(
        T5,
        "T5",
        {
            "Model": "AutoModel",
            "ForConditionalGeneration": "AutoModelForSeq2SeqLM",
            "EncoderModel": "AutoModelForTextEncoding",
        },
    ),
]
CASE = {case.plain_name: case for case in CASES}
# Of each family the class that every variant goes through.
LANGUAGE_MODELS = [CASE["BertForMaskedLM"], CASE["GPT2LMHeadModel"], CASE["T5ForConditionalGeneration"]]

each_family = pytest.mark.parametrize("case", LANGUAGE_MODELS, ids=lambda case: case.family.name)
each_class = pytest.mark.parametrize("case", CASES, ids=CASE)
each_head = pytest.mark.parametrize(
    "case", [case for case in CASES if case.task != "none"], ids=lambda case: case.plain_name
)
MECHANISMS = {"mha": "mha", "mae": "mae-1", "moa": "moa", "cct": "cct"}
each_mechanism = pytest.mark.parametrize(
    "fields", [VARIANTS[name] for name in MECHANISMS.values()], ids=MECHANISMS
)


def each_class_and_mechanism(test):
    """Each class with one of the mechanisms; with the others nightly. Another test has other pairs."""
    first = crc32(test.__name__.encode())
    pairs = [
        pytest.param(
            case,
            VARIANTS[name],
            id=f"{mechanism}-{case.plain_name}",
            marks=[] if (first + i + j) % len(MECHANISMS) == 0 else [pytest.mark.nightly],
        )
        for i, case in enumerate(CASES)
        for j, (mechanism, name) in enumerate(MECHANISMS.items())
    ]
    return pytest.mark.parametrize(("case", "fields"), pairs)(test)


def each_variant_but(
    *, slow: tuple[str, ...] = (), nightly_but: dict[str, set[str]] | None = None, **left_out: set[str]
) -> pytest.MarkDecorator:
    """Each family's variants, less those that are named for it; all of the families `slow` are slow, and
    of the families in `nightly_but` all but the named ones are nightly."""

    def marks(family: str, name: str) -> list[pytest.MarkDecorator]:
        is_nightly = nightly_but is not None and name not in nightly_but.get(family, (name,))
        found = [pytest.mark.nightly] if is_nightly else []
        return [*found, pytest.mark.slow] if family in slow else found

    return pytest.mark.parametrize(
        ("case", "fields"),
        [
            pytest.param(
                case,
                fields,
                id=f"{case.family.name}-{name}",
                marks=marks(case.family.name, name),
            )
            for case in LANGUAGE_MODELS
            for name, fields in case.family.variants.items()
            if name not in left_out.get(case.family.name, ())
        ],
    )


# of CCT
each_gated_variant = pytest.mark.parametrize(
    ("case", "fields"),
    [
        pytest.param(case, fields, id=f"{case.family.name}-{name}")
        for case in LANGUAGE_MODELS
        for name, fields in case.family.variants.items()
        if "cct_budgets" in fields
    ],
)


def each_variant(test):
    """Each variant in one of the families that have it; in the others nightly. Another test has it in
    another family."""
    first = crc32(test.__name__.encode())
    all_names = dict.fromkeys(name for case in LANGUAGE_MODELS for name in case.family.variants)
    chosen: dict[str, set[str]] = {case.family.name: set() for case in LANGUAGE_MODELS}
    for i, name in enumerate(all_names):
        families = [case.family for case in LANGUAGE_MODELS if name in case.family.variants]
        chosen[families[(first + i) % len(families)].name].add(name)
    return each_variant_but(nightly_but=chosen)(test)


def main_output(output) -> torch.Tensor:
    for name in ("logits", "start_logits", "last_hidden_state"):
        if output.get(name) is not None:
            return output[name]
    raise AssertionError(f"no main output among {list(output)}")
