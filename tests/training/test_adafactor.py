"""Adafactor under `MoaTrainer`, with steps relative to the size of the weights."""

import pytest
import torch

from hf_moa import MoaT5Config, MoaT5ForConditionalGeneration
from hf_moa.training import MoaSeq2SeqTrainer, MoaSeq2SeqTrainingArguments
from hf_moa.training.adafactor import SMALLEST_SIZE

RATE = 0.1
SIZES = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "num_heads": 4, "d_ff": 64, "num_layers": 1}


def step(folder, **arguments):
    """Weights before and after an update with random gradients."""
    torch.manual_seed(0)
    config = MoaT5Config(**SIZES, decoder_start_token_id=0, attention_type="mae")
    model = MoaT5ForConditionalGeneration(config)
    for name, p in model.named_parameters():
        if name.endswith("gate.out.weight"):
            torch.nn.init.zeros_(p)
    arguments = MoaSeq2SeqTrainingArguments(
        str(folder),
        optim="adafactor",
        learning_rate=RATE,
        mae_training="joint",
        use_cpu=True,
        **arguments,
    )
    optimizer = MoaSeq2SeqTrainer(model, arguments).create_optimizer()
    weights = [p for p in model.parameters() if p.ndim == 2]
    before = torch.stack([_size(p) for p in weights])
    old = [p.detach().clone() for p in weights]
    for p in weights:
        p.grad = torch.randn_like(p)
    optimizer.step()
    return before, torch.stack([_size(p - start) for p, start in zip(weights, old, strict=True)])


def _size(x):
    return x.detach().square().mean().sqrt()


def test_steps_are_relative_to_each_weight(tmp_path):
    """Also those of gates that start at zero, as a converted checkpoint's do."""
    sizes, moved = step(tmp_path, optim_args="scale_parameter=True")
    assert sizes.max() > 0.9
    assert sizes.min() < 1e-6
    torch.testing.assert_close(moved, RATE * sizes.clamp(min=SMALLEST_SIZE), rtol=0.1, atol=0)


@pytest.mark.parametrize("given", [None, "scale_parameter=False"])
def test_otherwise_they_are_as_in_trainer(tmp_path, given):
    _, moved = step(tmp_path, optim_args=given)
    torch.testing.assert_close(moved, torch.full_like(moved, RATE), rtol=0.1, atol=0)


def test_other_arguments_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"must be scale_parameter=True.* \(got 'clip_threshold=2'\)"):
        step(tmp_path, optim_args="clip_threshold=2")
