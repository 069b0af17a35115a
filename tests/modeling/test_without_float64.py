"""Apple's GPUs have no float64: neither models nor what training gathers of them may need it."""

import pytest
import torch
from families import each_variant
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_moa.expert_load import MeanExpertLoad
from hf_moa.modeling.core import precision
from hf_moa.training.step_statistics import StepStatistics, distinct_budgets


class WithoutFloat64(TorchDispatchMode):
    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        found = operator(*args, **(kwargs or {}))
        if any(isinstance(x, torch.Tensor) and x.dtype == torch.float64 for x in tree_leaves(found)):
            raise TypeError(f"{operator} made a float64 tensor")
        return found


@each_variant
def test_training_and_inference_need_none(case, fields, monkeypatch):
    monkeypatch.setattr(precision, "has_float64", lambda device: False)
    model, inputs, labels = case.build(**fields), case.inputs(), case.labels()
    gates = {"output_expert_weights": True} if fields.get("attention_type") == "mae" else {}
    if model.config.has_cct:
        budget = [model.config.cct_budgets[-1]] * len(inputs["input_ids"])
        budget = torch.tensor(budget, dtype=torch.float64)  # as NumPy's numbers are
    with WithoutFloat64():
        with torch.no_grad():
            model(**inputs)
            if model.config.has_cct:
                model(**inputs, budget=budget)
        outputs = model.train()(**inputs, **labels, **gates)
        outputs.loss.backward()
        budgets = distinct_budgets(model.config)
        StepStatistics().add_outputs(outputs, part_of_mean=None, budgets=budgets)
        MeanExpertLoad().add_outputs(outputs)


def test_which_devices_have_none(monkeypatch):
    monkeypatch.setattr(
        torch.xpu, "get_device_capability", lambda device: {"has_fp64": device.index > 0}
    )
    devices = {"cpu": True, "cuda:0": True, "mps:0": False, "xpu:0": False, "xpu:1": True}
    assert {name: precision.has_float64(torch.device(name)) for name in devices} == devices


def test_it_would_be_noticed():
    with WithoutFloat64(), pytest.raises(TypeError, match="float64"):
        torch.ones(1).double()
