"""Auxiliary losses under a loss that is computed outside the model, of logits or hidden states."""

import copy
import logging

import pytest
import torch
from families import CASE, CASES, LANGUAGE_MODELS, each_head, main_output
from transformers import EncoderDecoderModel
from transformers.utils import logging as transformers_logging

_KINDS = {
    "moa": {"attention_type": "moa", "router_balance_loss_coef": 2.0},
    "moe": {"ffn_type": "moe", "router_balance_loss_coef": 2.0},
    "cct": {"cct_budgets": [1, 0.5], "cct_budget_loss_coef": 2.0},
}
_ALL = _KINDS["moa"] | _KINDS["moe"] | _KINDS["cct"]


def _model(case, **fields):
    return case.build(**case.family.no_dropout | fields).double().train()


def _gradients(model, loss):
    parameters = list(model.parameters())
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]


def _run(model, case, **more):
    torch.manual_seed(1)  # of drawn budgets, and the gates' noise
    outputs = model(**case.inputs(), **more)
    return main_output(outputs).square().mean(), outputs


@pytest.mark.parametrize(
    ("case", "fields"),
    [
        *(pytest.param(case, _ALL, id=case.plain_name) for case in CASES),
        *(
            pytest.param(case, fields, id=f"{case.family.name}-{kind}")
            for case in LANGUAGE_MODELS
            for kind, fields in _KINDS.items()
        ),
    ],
)
def test_gradient_is_that_of_the_loss_with_the_auxiliary_losses(case, fields):
    """Also where a loss has them itself: never twice."""
    model = _model(case, **fields)
    loss, outputs = _run(model, case)
    expected = _gradients(model, loss + 0.5 * outputs.aux_loss)
    without = _gradients(model, _run(model, case)[0])
    assert any(not torch.allclose(one, other) for one, other in zip(expected, without, strict=True))
    model.carry_aux_loss(0.5)
    torch.testing.assert_close(_gradients(model, _run(model, case)[0]), expected)
    loss, outputs = _run(model, case)
    torch.testing.assert_close(_gradients(model, loss + 0.5 * outputs.aux_loss), expected)
    model.carry_aux_loss(None)
    torch.testing.assert_close(_gradients(model, _run(model, case)[0]), without)


@each_head
def test_loss_of_labels_stays_as_it_is(case):
    model = _model(case, **_ALL)
    inputs = {k: v for k, v in (case.inputs() | case.labels()).items() if k != "decoder_input_ids"}
    found = []
    for weight in (None, 3.0):
        model.carry_aux_loss(weight)
        torch.manual_seed(1)
        found.append(_gradients(model, model(**inputs).loss))
    torch.testing.assert_close(found[1], found[0])


def test_gradient_checkpointing_and_base_models_alike():
    """As TRL's SFTTrainer and sentence-transformers do, which call the base model."""
    case = CASE["GPT2LMHeadModel"]
    model = _model(case, **_KINDS["moe"])
    loss, outputs = _run(model.transformer, case)
    expected = _gradients(model, loss + outputs.aux_loss)
    model.carry_aux_loss()
    torch.testing.assert_close(_gradients(model, _run(model.transformer, case)[0]), expected)
    model.gradient_checkpointing_enable()
    torch.testing.assert_close(_gradients(model, _run(model.transformer, case)[0]), expected)


def test_encoder_decoder_model():
    encoder = _model(CASE["BertModel"], **_KINDS["moe"])
    decoder = CASE["GPT2LMHeadModel"].build(add_cross_attention=True).double()
    model = EncoderDecoderModel(encoder=encoder, decoder=decoder).train()
    inputs = CASE["BertModel"].inputs()
    ids = inputs["input_ids"][:, :4].contiguous()

    def router_gradient(coefficient):
        encoder.config.router_balance_loss_coef = coefficient
        torch.manual_seed(1)
        loss = model(**inputs, decoder_input_ids=ids, labels=ids).loss
        router = [p for name, p in encoder.named_parameters() if ".router." in name]
        return torch.autograd.grad(loss, router)

    encoder.carry_aux_loss()
    one, other = router_gradient(0.0), router_gradient(10.0)
    assert any((a - b).abs().max() > 1e-6 for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("adds", [False, True])
def test_warns_of_a_loss_without_them(adds, monkeypatch, caplog):
    case = CASE["GPT2LMHeadModel"]
    model = _model(case, **_KINDS["moe"])
    transformers_logging.get_logger("transformers").propagate = True
    monkeypatch.setattr(logging.Logger, "warning_once", logging.Logger.warning)
    loss, outputs = _run(model, case)
    (loss + outputs.aux_loss if adds else loss).backward()
    assert ("carry_aux_loss" in caplog.text) is not adds


@pytest.mark.parametrize("weight", [0, -1.0, float("inf"), True, "1"])
def test_weights(weight):
    model = CASE["BertModel"].build()
    with pytest.raises(ValueError, match="weight must be a finite number above 0"):
        model.carry_aux_loss(weight)


def test_carrying_models_can_be_copied_and_do_not_save_it(tmp_path):
    case = CASE["BertModel"]
    model = _model(case, **_KINDS["moe"])
    model.carry_aux_loss()
    copied = copy.deepcopy(model)
    expected = _gradients(model, _run(model, case)[0])
    torch.testing.assert_close(_gradients(copied, _run(copied, case)[0]), expected)
    model.save_pretrained(tmp_path)
    assert case.auto.from_pretrained(tmp_path)._carried_weight is None
