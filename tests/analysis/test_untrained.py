"""An analysis of gates that were never trained says so."""

import pytest
import torch
from families import CASE
from test_mae_measure import batches

from hf_moa import upcycle
from hf_moa.analysis import analyze
from hf_moa.analysis.untrained import untrained_mechanisms

UPCYCLED = {
    "mae": ({"attention_type": "mae"}, ["mae"]),
    "moa": ({"attention_type": "moa"}, ["router"]),
    "cct": ({"cct_budgets": [1, 0.5]}, ["cct"]),
    "mae-cct": ({"attention_type": "mae", "cct_budgets": [1, 0.5]}, ["mae", "cct"]),
    "nested": ({"nested_budgets": [1, 0.5]}, []),
}


@pytest.mark.parametrize(("fields", "names"), UPCYCLED.values(), ids=UPCYCLED)
def test_upcycled_gates_are_untrained_until_they_move(fields, names):
    case = CASE["BertForSequenceClassification"]
    model = upcycle(case.build_plain(), **fields)
    assert untrained_mechanisms(model) == names
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    budget = {"budget": 0.5} if "cct_budgets" in fields else {}
    model.train()(**case.inputs(), **case.labels(), **budget).loss.backward()
    optimizer.step()
    assert untrained_mechanisms(model) == []


def test_biases_of_budgets_are_a_decision():
    model = upcycle(CASE["BertForMaskedLM"].build_plain(), cct_budgets=[1, 0.5])
    for name, parameter in model.named_parameters():
        if name.endswith("budget_bias"):
            torch.nn.init.constant_(parameter, -1.0)
    assert untrained_mechanisms(model) == []


def test_analysis_says_so(caplog):
    case = CASE["BertForMaskedLM"]
    found = analyze(upcycle(case.build_plain(), "mae"), batches(case), progress=False)
    assert found.facts["never trained"].startswith("mae")
    assert "never trained" in caplog.text
    caplog.clear()
    found = analyze(case.build(attention_type="mae"), batches(case), progress=False)
    assert "never trained" not in found.facts
    assert "never trained" not in caplog.text
