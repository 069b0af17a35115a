"""The tables of class names by which transformers and other libraries decide what a model is."""

import sys

import pytest
import torch
from families import BERT, CASE, GPT2, T5
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainingArguments
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.utils import Modality
from transformers.models.auto import modeling_auto

import hf_moa

# Where transformers names a class of which there is no gated one: the class that has its weights.
_STAND_INS = {"BertForPreTraining": "BertForMaskedLM"}
_WITHOUT = {"BertLMHeadModel", "BertForNextSentencePrediction"}


def _tables():
    """(table, gated config, plain class) of all of transformers' tables, and its every class that has
    a gated one."""
    for table, names in vars(modeling_auto).items():
        if table.endswith("_MAPPING_NAMES") and table != "CONFIG_MAPPING_NAMES":
            for family in (BERT, GPT2, T5):
                plain = names.get(family.plain_config_class.model_type)
                if plain is not None and plain not in _WITHOUT:
                    yield pytest.param(names, family, plain, id=f"{table}-{plain}")


@pytest.mark.parametrize(("names", "family", "plain"), list(_tables()))
def test_gated_class_is_where_the_plain_one_is(names, family, plain):
    gated = f"Moa{_STAND_INS.get(plain, plain)}"
    assert names[family.config_class.model_type] == gated
    assert names._model_mapping[family.config_class] is getattr(hf_moa, gated)


@pytest.mark.parametrize("wrapped", [False, True], ids=["bare", "lora"])
@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "T5ForConditionalGeneration", "BertForMaskedLM"])
def test_trainer_smooths_the_labels_that_the_plain_model_has(name, wrapped, tmp_path):
    """`Trainer` shifts labels for classes that it knows by name: a model that it does not know would
    learn to repeat its input."""
    case = CASE[name]
    plain = case.build_plain()
    gated = case.gated(case.config())
    gated.load_state_dict(plain.state_dict())
    inputs = case.inputs() | case.labels()
    losses = []
    for model in (plain, gated.eval()):
        if wrapped:
            model = get_peft_model(model, LoraConfig(target_modules="all-linear"))
        arguments = TrainingArguments(
            str(tmp_path), label_smoothing_factor=0.1, use_cpu=True, report_to="none"
        )
        losses.append(Trainer(model, arguments).compute_loss(model, dict(inputs)))
    torch.testing.assert_close(losses[1], losses[0])


def test_servers_take_the_model():
    assert ModelManager.get_model_modality(CASE["GPT2LMHeadModel"].build()) is Modality.LLM


@pytest.mark.parametrize("name", ["num_experts", "num_experts_per_tok"])
@pytest.mark.parametrize("family", [BERT, GPT2, T5], ids=lambda family: family.name)
def test_no_library_takes_the_routers_for_mixtrals(family, name):
    """TRL reads these to compute Mixtral's loss, of logits of another shape."""
    config = family.config(ffn_type="moe")
    assert not hasattr(config, name)
    assert name not in config.to_dict()
    with pytest.raises(AttributeError, match="carry_aux_loss"):
        getattr(config, name)


def test_transformers_has_the_classes_by_name():
    """`transformers serve` looks for `config.architectures[0]` there."""
    for case in CASE.values():
        assert getattr(sys.modules["transformers"], f"Moa{case.plain_name}") is case.gated
