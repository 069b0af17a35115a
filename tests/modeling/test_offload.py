"""Models larger than their device: accelerate's offloading and dispatch, on CPU."""

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from common import alternating_device_map
from families import LANGUAGE_MODELS, each_class, each_family, main_output
from peft import get_peft_model

from hf_moa import FTGConfig, upcycle

NAMES = ["mha", "mae-1", "moa", "moe", "cct", "cct-plain", "moa-moe-cct"]


@each_family
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_offloaded_model_computes_the_same(case, name, where, tmp_path):
    """Every module gets its weights only on call, so that none may reach past another's `forward`."""
    model = case.build(**case.family.variants[name])
    inputs = case.inputs()
    expected = model(**inputs).logits
    if where == "cpu":
        cpu_offload(model, execution_device=torch.device("cpu"))
    else:
        disk_offload(model, tmp_path, execution_device=torch.device("cpu"))
    actual = model(**inputs).logits
    if model.config.has_cct:  # which takes parts of modules that are at hand, and others whole
        torch.testing.assert_close(actual, expected)
    else:
        assert torch.equal(actual, expected)


@each_class
def test_device_map_from_disk(case, tmp_path):
    """Half of the modules stay on disk between calls; no block is split."""
    model = case.build(attention_type="mae", ffn_type="moe")
    model.save_pretrained(tmp_path)
    inputs = case.inputs()
    device_map = alternating_device_map(model, "cpu", "disk")
    loaded = case.gated.from_pretrained(
        tmp_path, device_map=device_map, offload_folder=tmp_path / "offload"
    )
    assert {p.device.type for p in loaded.parameters()} == {"cpu", "meta"}
    torch.testing.assert_close(main_output(loaded(**inputs)), main_output(model(**inputs)))


@pytest.mark.parametrize("where", ["cpu", "disk", "device_map"])
def test_adapter_of_gates_refuses_an_offloaded_base(where, tmp_path):
    """Its copies would train without a weight, and what is called would be the base."""
    model = LANGUAGE_MODELS[0].build(attention_type="mae")
    if where == "cpu":
        cpu_offload(model, execution_device=torch.device("cpu"))
    elif where == "disk":
        disk_offload(model, tmp_path, execution_device=torch.device("cpu"))
    else:
        model.save_pretrained(tmp_path)
        model = LANGUAGE_MODELS[0].gated.from_pretrained(
            tmp_path,
            device_map=alternating_device_map(model, "disk", "cpu"),
            offload_folder=tmp_path / "offload",
        )
    with pytest.raises(ValueError, match=r"FTG copies the module .*gate, which must have its weights"):
        get_peft_model(model, FTGConfig())


def test_adapter_of_gates_takes_a_model_that_waits_for_its_weights():
    with torch.device("meta"):
        model = LANGUAGE_MODELS[0].gated(LANGUAGE_MODELS[0].config(attention_type="mae"))
        adapted = get_peft_model(model, FTGConfig())
    assert all(parameter.is_meta for parameter in adapted.parameters())


def test_offloaded_model_is_not_upcycled(tmp_path):
    model = cpu_offload(LANGUAGE_MODELS[0].build_plain(), execution_device=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"must have its weights at hand \(got .* on the meta device"):
        upcycle(model, "mae")
