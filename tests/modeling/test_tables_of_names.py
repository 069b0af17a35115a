"""Other libraries tell by transformers' tables of names what a model is: every gated class is there."""

import pytest
import torch
import transformers
from families import CASE, CASES
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainingArguments
from transformers.models.auto import modeling_auto

import hf_moa
from hf_moa.training import MoaTrainer, MoaTrainingArguments

TABLES = {
    name: table
    for name, table in vars(modeling_auto).items()
    if name.startswith("MODEL_") and name.endswith("_NAMES")
}


def tables_with(model_type, class_name):
    return {name for name, table in TABLES.items() if table.get(model_type) == class_name}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.plain_name)
def test_gated_classes_are_where_the_plain_ones_are(case):
    plain = tables_with(case.plain.config_class.model_type, case.plain_name)
    gated = tables_with(case.gated.config_class.model_type, case.gated.__name__)
    # a class of ours can stand where transformers has one that is not gated, as for pretraining
    assert plain <= gated
    assert gated - plain <= {"MODEL_FOR_PRETRAINING_MAPPING_NAMES"}


@pytest.mark.parametrize("name", ["AutoModelForPreTraining", "AutoModelForTextEncoding"])
@pytest.mark.parametrize("case", [CASE["BertModel"], CASE["GPT2LMHeadModel"], CASE["T5Model"]])
def test_auto_classes_that_the_backbones_have_give_gated_models(name, case):
    auto_class, config = getattr(transformers, name), case.config(attention_type="mae")
    if case.family.plain_config_class not in auto_class._model_mapping:
        pytest.skip("the plain backbone has none either")
    assert type(auto_class.from_config(config)).__module__.startswith("hf_moa.")


def test_the_tables_can_be_gone_through():
    for auto_class in vars(transformers).values():
        mapping = getattr(auto_class, "_model_mapping", None)
        if isinstance(auto_class, type) and mapping is not None:
            assert len(mapping) > 0
            assert "moa_bert" not in mapping._config_mapping


@pytest.mark.parametrize("wrapped", [False, True], ids=["bare", "lora"])
@pytest.mark.parametrize("trainer_class", [Trainer, MoaTrainer])
def test_label_smoothing_shifts_labels_as_for_transformers_own(trainer_class, wrapped, tmp_path):
    case = CASE["GPT2LMHeadModel"]
    plain = case.build_plain(**dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0))
    gated, losses = hf_moa.upcycle(plain), []
    inputs = case.inputs() | case.labels()
    for model, kind in ((plain, Trainer), (gated, trainer_class)):
        if wrapped:
            model = get_peft_model(model, LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True))
        arguments = MoaTrainingArguments if kind is MoaTrainer else TrainingArguments
        args = arguments(str(tmp_path), label_smoothing_factor=0.1, use_cpu=True, report_to="none")
        losses.append(kind(model.train(), args).compute_loss(model, dict(inputs)))
    torch.testing.assert_close(losses[1], losses[0])
