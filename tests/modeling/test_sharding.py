"""torch without distributed training, as on some systems."""

import importlib.util
import sys

import pytest
import torch

from hf_moa.modeling.core import sharding


@pytest.mark.parametrize("distributed", [True, False])
def test_nothing_is_sharded_where_torch_knows_no_processes(distributed, monkeypatch):
    if not distributed:
        for name in ("fsdp", "tensor"):
            monkeypatch.setitem(sys.modules, f"torch.distributed.{name}", None)
    spec = importlib.util.spec_from_file_location("sharding_again", sharding.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (module.DTensor is sharding.DTensor) == distributed
    assert (module.FSDPModule is sharding.FSDPModule) == distributed
    assert not isinstance(torch.ones(1), module.DTensor)
    assert not issubclass(torch.nn.Linear, module.FSDPModule)
