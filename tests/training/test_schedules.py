"""The CCT noise schedule, alone and driven by a `Trainer`."""

from types import SimpleNamespace

import pytest
import torch
from transformers import Trainer, TrainerState, TrainingArguments

from hf_moa import MoaBertConfig, MoaBertModel
from hf_moa.training import CCTNoiseCallback, cct_noise_scale


class FakeCCTModel(torch.nn.Module):
    """A linear model that notes the noise scales it is told."""

    def __init__(self, cct_budgets=(1.0, 0.5), gates="soft"):
        super().__init__()
        self.linear = torch.nn.Linear(2, 1)
        self.config = SimpleNamespace(
            cct_budgets=cct_budgets, cct_noise_max=5.0, cct_gate_training=gates
        )
        self.scales = []

    def set_cct_noise_scale(self, alpha):
        self.scales.append(alpha)

    def forward(self, x):
        return {"loss": self.linear(x).pow(2).mean()}


def make_trainer(model, tmp_path, callback, max_steps=4, **kwargs):
    args = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=max_steps,
        per_device_train_batch_size=1,
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        **kwargs,
    )
    data = [{"x": torch.ones(2)} for _ in range(16)]
    return Trainer(model=model, args=args, train_dataset=data, callbacks=[callback])


@pytest.mark.parametrize(
    ("step", "expected"), [(0, 0.0), (1, 0.5), (5, 2.5), (10, 5.0), (11, 5.0), (1000, 5.0)]
)
def test_noise_grows_linearly_and_stays(step, expected):
    assert cct_noise_scale(step, num_steps=10, noise_max=5.0) == expected


@pytest.mark.parametrize(
    ("step", "expected"), [(0, 5.0), (1, 4.5), (5, 2.5), (10, 0.0), (11, 0.0), (1000, 0.0)]
)
def test_noise_falls_linearly_and_stays_away(step, expected):
    assert cct_noise_scale(step, num_steps=10, noise_max=5.0, falls=True) == expected


@pytest.mark.parametrize("num_steps", [0, -1, 2.0, "3", True, None])
def test_bad_num_steps_is_an_error(num_steps):
    with pytest.raises(ValueError, match=r"`num_steps` must be an integer >= 1.* \(got"):
        cct_noise_scale(0, num_steps, 5.0)
    if num_steps is not None:
        with pytest.raises(ValueError, match="`num_steps`"):
            CCTNoiseCallback(num_steps)


def test_default_is_all_steps_of_the_run(tmp_path):
    model = FakeCCTModel()
    make_trainer(model, tmp_path, CCTNoiseCallback()).train()
    assert model.scales == [0.0, 1.25, 2.5, 3.75]


def test_noise_of_hard_gates_falls_and_the_last_steps_have_none(tmp_path):
    model = FakeCCTModel(gates="hard")
    make_trainer(model, tmp_path, CCTNoiseCallback(), max_steps=10).train()
    expected = [5 * (9 - step) / 9 for step in range(10)]
    assert model.scales == pytest.approx(expected, abs=1e-12)
    model.scales.clear()
    make_trainer(model, tmp_path, CCTNoiseCallback(num_steps=2)).train()
    assert model.scales == [5.0, 2.5, 0.0, 0.0]


def test_model_of_a_checkpoints_older_code():
    model = FakeCCTModel()
    del model.config.cct_gate_training
    CCTNoiseCallback().on_step_begin(None, TrainerState(global_step=1, max_steps=4), None, model=model)
    assert model.scales == [1.25]


def test_noise_follows_optimiser_steps_not_micro_batches(tmp_path):
    model = FakeCCTModel()
    callback = CCTNoiseCallback(num_steps=2)
    make_trainer(model, tmp_path, callback, gradient_accumulation_steps=2).train()
    assert model.scales == [0.0, 2.5, 5.0, 5.0]


def test_resumed_run_continues_the_schedule(tmp_path):
    model = FakeCCTModel()
    state = TrainerState(global_step=3, max_steps=4)
    CCTNoiseCallback().on_step_begin(None, state, None, model=model)
    assert model.scales == [3.75]


def test_wrapped_models_are_unwrapped():
    model = FakeCCTModel()
    state = TrainerState(global_step=1, max_steps=4)
    wrapped = torch.nn.DataParallel(model)
    callback = CCTNoiseCallback()
    callback.on_train_begin(None, state, None, model=wrapped)
    callback.on_step_begin(None, state, None, model=wrapped)
    compiled = torch.compile(model)
    callback.on_train_begin(None, state, None, model=compiled)
    callback.on_step_begin(None, state, None, model=compiled)
    assert model.scales == [1.25, 1.25]


def test_noise_reaches_every_control_network_of_a_real_model():
    config = MoaBertConfig(
        vocab_size=10,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        cct_budgets=[1.0, 0.5],
        cct_noise_max=2.0,
    )
    model = MoaBertModel(config)
    state = TrainerState(global_step=1, max_steps=4)
    CCTNoiseCallback().on_step_begin(None, state, None, model=model)
    scales = [buffer.item() for name, buffer in model.named_buffers() if "noise_scale" in name]
    # Attention and feed-forward of two layers.
    assert scales == [0.5] * 4


def test_model_without_cct_is_an_error_when_training_begins(tmp_path):
    trainer = make_trainer(FakeCCTModel(cct_budgets=None), tmp_path, CCTNoiseCallback())
    with pytest.raises(ValueError, match=r"needs a model with CCT gates .*FakeCCTModel"):
        trainer.train()
