"""Several processes without an accelerator train together, or somebody says why not."""

import logging

import pytest
import torch

from hf_moa.training import MoaTrainingArguments, cpu_processes


@pytest.fixture
def environment(monkeypatch):
    cpu_processes.logger.warning_once.cache_clear()  # an earlier run may have warned
    for name in (*cpu_processes._SIZES, "MASTER_ADDR", "ACCELERATE_DYNAMO_BACKEND"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_one_process_where_several_were_asked_for(environment, caplog):
    caplog.set_level(logging.WARNING, logger="hf_moa.training")  # which scripts set, too
    environment.setenv("MASTER_ADDR", "127.0.0.1")
    cpu_processes.warn_of_single_process()
    assert not caplog.records  # an address is nothing that only Accelerate sets
    environment.setenv("ACCELERATE_DYNAMO_BACKEND", "NO")
    environment.setenv("WORLD_SIZE", "2")
    cpu_processes.warn_of_single_process()
    assert not caplog.records
    environment.delenv("WORLD_SIZE")
    cpu_processes.warn_of_single_process()
    assert "started one" in caplog.text


def test_processes_share_a_cpu_only_without_accelerator(environment):
    assert not cpu_processes.train_together_on_cpu()
    environment.setenv("WORLD_SIZE", "1")
    assert not cpu_processes.train_together_on_cpu()
    environment.setenv("WORLD_SIZE", "2")
    for available in (False, True):
        environment.setattr(torch.accelerator, "is_available", lambda available=available: available)
        assert cpu_processes.train_together_on_cpu() is not available
    environment.setattr(torch.accelerator, "is_available", lambda: False)
    environment.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    assert not cpu_processes.train_together_on_cpu()


def test_one_process_trains_as_ever(environment, tmp_path):
    assert not MoaTrainingArguments(str(tmp_path), use_cpu=False).use_cpu
