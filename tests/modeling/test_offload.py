"""Models larger than their device: accelerate's offloading and dispatch, on CPU."""

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from common import alternating_device_map
from families import LANGUAGE_MODELS, each_class, main_output

each_family = pytest.mark.parametrize("case", LANGUAGE_MODELS, ids=lambda case: case.family.name)
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
