"""The Accelerate scripts stop where an update must not be made."""

from types import SimpleNamespace

import pytest
import run_clm_no_trainer
import torch
from accelerate_runs import run
from transformers import default_data_collator

from hf_moa.recipes.accelerate import training
from hf_moa.training import TrainingDivergedError


def test_infinite_loss_stops_a_run_with_a_scaler(arguments, monkeypatch):
    """Which skips the updates of infinite gradients, and would go on for ever."""
    backward = training.GatedTraining._backward

    def poisoned(self, *args):
        self.accelerator.scaler = SimpleNamespace(scale=lambda loss: loss)
        outputs, loss = backward(self, *args)
        for p in self.gated.parameters():
            p.grad = p.grad * float("nan")
        return outputs, loss * float("nan")

    monkeypatch.setattr(training.GatedTraining, "_backward", poisoned)
    monkeypatch.setattr(training.Accelerator, "unscale_gradients", lambda self: None)
    with pytest.raises(TrainingDivergedError, match="The loss is infinite"):
        run("clm", arguments("clm"))


def test_divergence_stops_after_saving(arguments, tmp_path):
    values = arguments("clm", attention_type="mae", learning_rate=1e30, max_grad_norm=0)
    with pytest.raises(TrainingDivergedError, match=r"step .*Last losses: loss .*learning_rate"):
        run("clm", values)
    assert list((tmp_path / "out").glob("diverged-*/model.safetensors"))


def test_loss_that_is_not_finite_stops_a_run_whatever_its_gradients(arguments, monkeypatch):
    backward = training.GatedTraining._backward

    def poisoned(self, *args):
        outputs, loss = backward(self, *args)
        return outputs, loss * float("nan")

    monkeypatch.setattr(training.GatedTraining, "_backward", poisoned)
    with pytest.raises(TrainingDivergedError, match="The loss is infinite or no number"):
        run("clm", arguments("clm"))


def test_divergence_in_the_first_gate_step_names_its_losses(arguments, monkeypatch, tmp_path):
    load_model = run_clm_no_trainer.load_model

    def poisoned(*args, **kwargs):
        model = load_model(*args, **kwargs)
        gate = next(p for name, p in model.named_parameters() if ".mixture.gate." in name)
        gate.register_hook(lambda gradient: gradient * float("nan"))
        return model

    monkeypatch.setattr(run_clm_no_trainer, "load_model", poisoned)
    with pytest.raises(TrainingDivergedError, match=r"gates' gradients.*Last losses: loss \d+\.\d+\. "):
        run("clm", arguments("clm", attention_type="mae"))


def test_update_without_labels_is_told_apart(arguments, monkeypatch):
    monkeypatch.setattr(
        run_clm_no_trainer,
        "default_data_collator",
        lambda rows: (
            (batch := default_data_collator(rows)) | {"labels": torch.full_like(batch["labels"], -100)}
        ),
    )
    with pytest.raises(TrainingDivergedError, match="no label to learn from"):
        run("clm", arguments("clm"))
