"""PEFT's own tests on FTG adapters: `python tests/upstream/run_peft.py SOURCE` runs them.

PEFT's test modules hold tables of models and adapters, from which their test classes are parametrised.
Here the tables are emptied and filled with FTG: on PEFT's toy modules (`test_custom_models.py`), and on
the gated models, tiny and random, from a temporary folder. Tests that are about other methods are left
out.
"""

from __future__ import annotations

import fnmatch
import tempfile
from pathlib import Path

import pytest
from common import randomize
from families import BERT, GPT2, T5
from transformers import set_seed

import hf_moa
from hf_moa import FTGConfig
from tests import (
    test_config,
    test_custom_models,
    test_decoder_models,
    test_encoder_decoder_models,
    test_feature_extraction_models,
    test_seq_classifier,
    test_token_classification_qa,
)

# tests, and why they say nothing of FTG
_HARD_GATES = "trains in eval mode, where CCT's gates are hard and have no gradient"
INAPPLICABLE = {
    "test_from_pretrained[[]FTGConfig-mandatory_kwargs0]": "needs the Hub",
    "test_from_pretrained_cache_dir[[]*": "needs the Hub",
    "test_save_pretrained_with_runtime_config[[]*": "needs the Hub",
    "test_merge_layers_multi[[]*": "merges two adapters into one: FTG's are copies of the same gates, "
    "which cannot be summed (a ValueError)",
    "test_training*-cct]": _HARD_GATES,
    "test_inference_safetensors[[]FTGConfig-config_kwargs0-*-cct]": _HARD_GATES,
    "test_training*checkpointing[[]True-*-moa]": "reentrant checkpointing would lose the gradients of "
    "routers' auxiliary losses (a ValueError)",
}

MODELS = tempfile.TemporaryDirectory(prefix="hf_moa_upstream_")
GATES = {
    "mae": {"attention_type": "mae"},
    "moa": {"attention_type": "moa", "num_attention_experts": 6},
    "cct": {"cct_budgets": [1, 0.5]},
}
NO_DROPOUT = {"bert": BERT.no_dropout, "gpt2": GPT2.no_dropout, "t5": T5.no_dropout}


def replace(table: list, rows: list) -> None:
    """Put `rows` instead of a table's rows: the test classes know the list itself."""
    table[:] = rows


def save_models(family, model_class: type, *gates: str) -> list[str]:
    """Folders of tiny models. (No name says "gpt2": there PEFT skips all methods but its own.)"""
    folders = []
    for name in gates:
        set_seed(0)
        fields = NO_DROPOUT[family.name] | GATES[name]
        model = randomize(model_class(family.config(**fields)), scale=0.1)
        folder = Path(MODELS.name, f"{model_class.__name__.replace('GPT2', '')}-{name}")
        model.save_pretrained(folder)
        folders.append(str(folder))
    return folders


def adapters(task_type: str | None) -> list[tuple]:
    """FTG and FTG+."""
    return [(FTGConfig, {"task_type": task_type, "plus": plus}) for plus in (False, True)]


replace(
    test_custom_models.TEST_CASES,
    [
        ("MLP 1 FTG", "MLP", FTGConfig, {"target_modules": "lin0"}),
        ("MLP 2 FTG", "MLP", FTGConfig, {"target_modules": ["lin0"]}),
        ("MLP 3 FTG", "MLP", FTGConfig, {"target_modules": ["lin0"], "modules_to_save": ["lin1"]}),
        ("LayerNorm FTG", "MLP_LayerNorm", FTGConfig, {"target_modules": ["layernorm0", "lin0"]}),
        ("Embedding and Conv1D FTG", "EmbConv1D", FTGConfig, {"target_modules": ["emb", "conv1d"]}),
        ("Conv2D FTG", "Conv2d", FTGConfig, {"target_modules": ["conv2d", "lin0"]}),
    ],
)
for test in vars(test_config.TestPeftConfig).values():
    for i, mark in enumerate(getattr(test, "pytestmark", [])):
        if mark.args[1:] == (test_config.ALL_CONFIG_CLASSES,):  # a tuple
            test.pytestmark[i] = pytest.mark.parametrize(mark.args[0], [(FTGConfig, {})]).mark

# PEFT's table of models, its tables of adapters, and what takes their places
for models, tables, family, model_class, tasks in (
    (
        test_decoder_models.PEFT_DECODER_MODELS_TO_TEST,
        [test_decoder_models.ALL_CONFIGS],
        GPT2,
        hf_moa.MoaGPT2LMHeadModel,
        ["CAUSAL_LM"],
    ),
    (
        test_encoder_decoder_models.PEFT_ENCODER_DECODER_MODELS_TO_TEST,
        [test_encoder_decoder_models.ALL_CONFIGS],
        T5,
        hf_moa.MoaT5ForConditionalGeneration,
        ["SEQ_2_SEQ_LM"],
    ),
    (
        test_feature_extraction_models.PEFT_FEATURE_EXTRACTION_MODELS_TO_TEST,
        [test_feature_extraction_models.ALL_CONFIGS],
        BERT,
        hf_moa.MoaBertModel,
        ["FEATURE_EXTRACTION"],
    ),
    (
        test_seq_classifier.PEFT_SEQ_CLS_MODELS_TO_TEST,
        [test_seq_classifier.ALL_CONFIGS],
        BERT,
        hf_moa.MoaBertForSequenceClassification,
        ["SEQ_CLS"],
    ),
    (  # one list of models for both tasks
        test_token_classification_qa.PEFT_TOKEN_CLS_MODELS_TO_TEST,
        [test_token_classification_qa.TOKEN_CLS_CONFIGS, test_token_classification_qa.QA_CONFIGS],
        BERT,
        hf_moa.MoaBertForTokenClassification,
        ["TOKEN_CLS", "QUESTION_ANS"],
    ),
):
    replace(models, save_models(family, model_class, *GATES))
    for table, task in zip(tables, tasks, strict=True):
        replace(table, adapters(task))


def is_about_ftg(item: pytest.Item) -> bool:
    """Whether a collected test is parametrised with an FTG adapter."""
    return FTGConfig in getattr(getattr(item, "callspec", None), "params", {}).values()


def inapplicable(item: pytest.Item) -> str | None:
    """Why a test says nothing of FTG, or None."""
    return next((why for name, why in INAPPLICABLE.items() if fnmatch.fnmatch(item.name, name)), None)


class TestConfig(test_config.TestPeftConfig):
    pass


class TestCustomModel(test_custom_models.TestPeftCustomModel):
    pass


class TestDecoder(test_decoder_models.TestDecoderModels):
    pass


class TestEncoderDecoder(test_encoder_decoder_models.TestEncoderDecoderModels):
    pass


class TestFeatureExtraction(test_feature_extraction_models.TestPeftFeatureExtractionModel):
    pass


class TestSequenceClassification(test_seq_classifier.TestSequenceClassificationModels):
    pass


class TestTokenClassification(test_token_classification_qa.TestTokenClassificationModels):
    pass


class TestQuestionAnswering(test_token_classification_qa.TestQuestionAnsweringModels):
    pass
