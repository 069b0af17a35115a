"""Dropout is in modules, where others find and switch it: TRL's DPO, Monte-Carlo dropout, PEFT's."""

import pytest
import torch
from families import each_family, each_mechanism, main_output
from torch import nn

from hf_moa.modeling.attention.layer import GatedAttention


def _attention_modules(model):
    names = ("self.dropout", "attn.attn_dropout", "SelfAttention.dropout", "EncDecAttention.dropout")
    return {n: m for n, m in model.named_modules() if n.endswith(names)}


@each_family
@each_mechanism
def test_nothing_drops_where_all_modules_are_set_to_zero(case, fields):
    """As TRL does it for policy and reference, whose first DPO loss is ln 2 then."""
    model = case.build(**dict.fromkeys(case.family.no_dropout, 0.5) | fields).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0
    still = case.build(**case.family.no_dropout | fields).train()
    inputs = case.inputs() | ({"budget": 0.5} if "cct_budgets" in fields else {})
    outputs = []
    for each in (model, still):
        torch.manual_seed(0)  # of CCT's noise
        outputs.append(main_output(each(**inputs)))
    assert torch.equal(*outputs)


@each_family
@pytest.mark.parametrize("change", ["p", "eval", "replaced"])
def test_attention_has_its_dropout_under_the_backbones_name(case, change):
    dropouts = dict.fromkeys(case.family.no_dropout, 0.0)
    rates = ("attention_probs_dropout_prob", "attn_pdrop", "dropout_rate")
    dropouts |= {name: 0.5 for name in dropouts if name in rates}
    model = case.build(**dropouts).train()
    found = _attention_modules(model)
    attentions = [m for m in model.modules() if hasattr(m, "mixture") and hasattr(m, "attend")]
    assert len(found) == len(attentions)
    if hasattr(model, "encoder"):  # T5 has one rate for all
        others = [m for m in model.modules() if isinstance(m, nn.Dropout) and m not in found.values()]
        for module in others:
            module.p = 0.0
    torch.manual_seed(0)
    dropped = main_output(model(**case.inputs()))
    for name, module in found.items():
        assert module.p == 0.5
        if change == "p":
            module.p = 0.0
        elif change == "eval":
            module.eval()
        else:
            model.set_submodule(name, nn.Identity())
    model_in_train = main_output(model(**case.inputs()))
    assert not torch.allclose(dropped, model_in_train)
    torch.testing.assert_close(model_in_train, main_output(model.eval()(**case.inputs())))


def test_gated_attention():
    layer = GatedAttention(32, 4, attention_dropout=0.9).train()
    x = torch.randn(1, 6, 32)
    expected = layer.eval()(x).hidden_states
    assert not torch.allclose(layer.train()(x).hidden_states, expected)
    layer.attention_dropout.p = 0
    torch.testing.assert_close(layer(x).hidden_states, expected)
