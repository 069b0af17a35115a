"""What quantisers leave out: gates, of which they would leave nothing."""

import pytest
import torch
from families import LANGUAGE_MODELS, each_family
from torch import nn
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from hf_moa.modeling.core import gated_model

VARIANTS = ["mae-1", "moa", "moe", "cct", "cct-plain", "moa-moe-cct"]


def inside_gates(model):
    """The names of all modules in gates."""
    return {
        f"{name}.{inner}"
        for name, gate in model.named_modules()
        if getattr(gate, "gate_kind", None)
        for inner, _ in gate.named_modules()
    }


@each_family
@pytest.mark.parametrize("name", VARIANTS)
def test_quantisers_leave_gates_out(case, name):
    model = case.build(**case.family.variants[name])
    left_out = HfQuantizer.get_modules_to_not_convert(model, None, model._keep_in_fp32_modules)
    gates = inside_gates(model)
    found = {False: set(), True: set()}
    for each, module in model.named_modules():
        if isinstance(module, (nn.Linear, Conv1D)):
            found[each in gates].add(should_convert_module(each, left_out))
    assert found[True] == {False}
    assert True in found[False]


@each_family
def test_gates_in_half_precision_are_in_half_precision(case, tmp_path):
    """Which `_keep_in_fp32_modules` would prevent in transformers' own models."""
    model = case.build(attention_type="moa", ffn_type="moe", cct_budgets=[1, 0.5])
    model.save_pretrained(tmp_path)
    loaded = case.gated.from_pretrained(tmp_path, dtype=torch.float16)
    gates = inside_gates(loaded)
    parameters = {name: p for name, p in loaded.named_parameters() if name.rpartition(".")[0] in gates}
    assert parameters
    assert {p.dtype for p in parameters.values()} == {torch.float16}


@pytest.mark.parametrize(("name", "warnings"), [("moe", 1), ("moa", 1), ("mae-1", 0)])
def test_experts_that_stay_are_named_once(name, warnings, tmp_path, monkeypatch):
    case = LANGUAGE_MODELS[0]
    case.build(**case.family.variants[name]).save_pretrained(tmp_path)
    seen = []
    monkeypatch.setattr(gated_model.logger, "warning_once", seen.append)
    case.gated.from_pretrained(tmp_path)
    assert not seen
    monkeypatch.setattr(case.gated, "is_quantized", True, raising=False)  # as a quantiser leaves it
    case.gated.from_pretrained(tmp_path)
    assert len(seen) == warnings
    if warnings:
        assert "leaves the experts of MoaBertForMaskedLM as they are: bert.encoder.layer.0." in seen[0]
