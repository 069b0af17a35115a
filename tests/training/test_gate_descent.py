"""Block coordinate descent (Peng et al. 2020): which step moves what, and by how much."""

import pytest
import torch
from training_runs import CLASSES, PLAIN_SGD, assert_same, build, experts, gates, rows, run, trainer
from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator

from hf_moa.training import (
    BlockCoordinateDescent,
    NonFiniteGradientError,
    gate_parameters,
    other_parameters,
)

each_backbone = pytest.mark.parametrize("name", CLASSES)


def micro_batches(name, size=4):
    data = list(rows(name))
    return [default_data_collator(data[i : i + size]) for i in range(0, len(data), size)]


def differ(one, other):
    return all(not torch.equal(one[name], other[name]) for name in one)


# --- a step by itself -----------------------------------------------------------------------------


@each_backbone
def test_gate_step_is_sgd_on_the_mixture(name):
    """The update, computed by hand in the mixture phase, where all parameters have gradients."""
    model = build(name, attention_type="mae").double().train()
    batches = micro_batches(name)
    before = experts(model)
    expected = gates(model)
    for batch in batches:
        (model(**batch).loss / len(batches)).backward()
    for key in expected:
        expected[key] -= 0.7 * model.get_parameter(key).grad
    model.zero_grad()

    model = build(name, attention_type="mae").double().train()  # with the statistics of the start
    descent = BlockCoordinateDescent(model, learning_rate=0.7)
    descent.gate_step(lambda batch: (model(**batch).loss / len(batches)).backward(), batches)
    assert_same(experts(model), before)
    for key, value in gates(model).items():
        torch.testing.assert_close(value, expected[key], atol=1e-12, rtol=1e-10)
    assert all(p.grad is None for p in model.parameters())
    assert model.mae_phase == "expert"
    descent.finish()
    assert model.mae_phase == "mixture"


def test_epochs_with_gate_steps():
    model = build("bert", attention_type="mae")
    descent = BlockCoordinateDescent(model)
    assert [epoch for epoch in range(12) if descent.has_gate_steps(epoch)] == [0, 5, 10]
    descent = BlockCoordinateDescent(model, gate_every_n_epochs=3)
    assert [epoch for epoch in range(7) if descent.has_gate_steps(epoch)] == [0, 3, 6]
    descent = BlockCoordinateDescent(model, gate_every_n_epochs=None)
    assert not any(descent.has_gate_steps(epoch) for epoch in range(7))


def test_parameters_are_gates_or_others():
    model = build("t5", attention_type="mae")
    ours, others = gate_parameters(model), other_parameters(model)
    assert {id(p) for p in ours} == {id(model.get_parameter(name)) for name in gates(model)}
    assert len(ours) + len(others) == len(list(model.parameters()))
    ours[0].requires_grad_(False)
    assert len(gate_parameters(model)) == len(ours) - 1


def test_gates_without_gradients_are_an_error():
    """As where sharded gradients were not reduced: SGD would do nothing, and nobody would know."""
    descent = BlockCoordinateDescent(build("bert", attention_type="mae").train())
    with pytest.raises(RuntimeError, match="got no gradient"):
        descent.gate_step(lambda batch: None, micro_batches("bert"))


def test_gates_stay_where_their_gradients_are_not_finite():
    model = build("bert", attention_type="mae").train()
    descent, before = BlockCoordinateDescent(model), gates(model)
    with pytest.raises(NonFiniteGradientError, match="nan"):
        descent.gate_step(
            lambda batch: (model(**batch).loss * float("nan")).backward(), micro_batches("bert")
        )
    assert_same(gates(model), before)
    # and the next step knows nothing of them
    descent.gate_step(lambda batch: model(**batch).loss.backward(), micro_batches("bert"))
    assert differ(gates(model), before)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"learning_rate": 0}, "gate_learning_rate"),
        ({"learning_rate": float("nan")}, "gate_learning_rate"),
        ({"gate_every_n_epochs": 0}, "gate_every_n_epochs"),
        ({"gate_every_n_epochs": 2.0}, "gate_every_n_epochs"),
    ],
)
def test_bad_settings_are_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        BlockCoordinateDescent(build("bert", attention_type="mae"), **arguments)


@pytest.mark.parametrize("fields", [{}, {"attention_type": "mae", "mae_gate_type": "uniform"}])
def test_models_without_gates_are_errors(fields):
    with pytest.raises(ValueError, match=r"attention_type='mae'|mae_gate_type='uniform'"):
        BlockCoordinateDescent(build("bert", **fields))


# --- in a run -------------------------------------------------------------------------------------


class Snapshots(TrainerCallback):
    """Gates and experts at the start and after every update."""

    def __init__(self, model):
        self.gates, self.experts = [gates(model)], [experts(model)]

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.gates.append(gates(model))
        self.experts.append(experts(model))


@each_backbone
def test_gates_move_in_gate_epochs_alone(name, tmp_path):
    model = build(name, attention_type="mae", dropout=True)
    made = trainer(
        name,
        model,
        tmp_path,
        num_train_epochs=4,
        max_steps=-1,
        gate_every_n_epochs=2,
        weight_decay=0.1,
        learning_rate=1e-3,
        warmup_steps=0.5,
    )
    snapshots = Snapshots(model)
    made.add_callback(snapshots)
    made.train()
    moved = [
        differ(*(snapshots.gates[i], snapshots.gates[i + 1])) for i in range(len(snapshots.gates) - 1)
    ]
    assert moved == [True, True, False, False, True, True, False, False]
    for i in (2, 3, 6, 7):
        assert_same(snapshots.gates[i + 1], snapshots.gates[i])
    assert not any(id(p) in {id(g) for g in gate_parameters(model)} for p in _trained_by(made))
    assert model.mae_phase == "mixture"


def _trained_by(made):
    return [p for group in made.optimizer.param_groups for p in group["params"]]


@pytest.mark.parametrize("accumulation", [1, 2])
@each_backbone
def test_gate_update_comes_first_and_is_plain_sgd(name, accumulation, tmp_path):
    """Whatever the other optimiser is; and the F step's forward sees the updated gates."""
    data = list(rows(name))
    batches = [default_data_collator(data[i : i + 4]) for i in range(0, 4 * accumulation, 4)]
    model = build(name, attention_type="mae").double().train()
    expected = gates(model)
    for batch in batches:
        (model(**batch).loss / len(batches)).backward()
    for key in expected:
        expected[key] -= 0.3 * model.get_parameter(key).grad

    model, seen = build(name, attention_type="mae").double(), []
    model.register_forward_pre_hook(lambda *_: seen.append((model.mae_phase, gates(model))))
    start = gates(model)
    run(
        name,
        model,
        tmp_path,
        gate_learning_rate=0.3,
        gradient_accumulation_steps=accumulation,
        weight_decay=0.5,
        learning_rate=1e-2,
        max_grad_norm=1e-4,
        train_sampling_strategy="sequential",
    )
    assert [phase for phase, _ in seen] == ["gate"] * accumulation + ["expert"] * accumulation
    assert_same(seen[0][1], start)
    assert_same(seen[accumulation][1], gates(model))
    for key, value in gates(model).items():
        torch.testing.assert_close(value, expected[key], atol=1e-12, rtol=1e-10)


def test_every_update_takes_its_gate_step_first(tmp_path):
    model, seen = build("bert", attention_type="mae"), []
    model.register_forward_pre_hook(lambda *_: seen.append((model.mae_phase, gates(model))))
    run("bert", model, tmp_path, max_steps=3, gate_every_n_epochs=1, gate_learning_rate=0.3)
    assert [phase for phase, _ in seen] == ["gate", "expert"] * 3
    seen = [each for _, each in seen]
    for before, after in zip(seen[::2], seen[1::2], strict=True):  # F steps see the updated gates
        assert differ(before, after)
    for after, following in zip(seen[1::2], seen[2::2], strict=False):  # and do not change them
        assert_same(following, after)


def test_epochs_of_a_stream_are_counted_in_steps(tmp_path):
    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self):
            while True:
                yield from rows("bert")

    model = build("bert", attention_type="mae")
    made = trainer("bert", model, tmp_path, data=Endless(), max_steps=6, gate_epoch_steps=2,
                   gate_every_n_epochs=2)  # fmt: skip
    snapshots = Snapshots(model)
    made.add_callback(snapshots)
    made.train()
    moved = [differ(snapshots.gates[i], snapshots.gates[i + 1]) for i in range(6)]
    assert moved == [True, True, False, False, True, True]


def test_batches_of_a_stream_without_an_update_take_no_gate_step(tmp_path):
    class Short(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield from list(rows("bert", count=6))

    model = build("bert", attention_type="mae")
    made = trainer("bert", model, tmp_path, data=Short(), max_steps=4, gate_epoch_steps=1,
                   gate_every_n_epochs=1, per_device_train_batch_size=2,
                   gradient_accumulation_steps=2)  # fmt: skip
    phases = []
    model.register_forward_pre_hook(lambda *_: phases.append(model.mae_phase))
    made.train()
    assert made.state.global_step == 4
    assert phases.count("gate") == 4 * 2


def test_joint_training_is_the_plain_trainers(tmp_path):
    model = build("bert", attention_type="mae", dropout=True)
    run("bert", model, tmp_path, mae_training="joint", max_steps=3, learning_rate=1e-2)
    plain = build("bert", attention_type="mae", dropout=True)
    arguments = TrainingArguments(
        str(tmp_path),
        max_steps=3,
        learning_rate=1e-2,
        per_device_train_batch_size=4,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    Trainer(plain, arguments, train_dataset=list(rows("bert"))).train()
    assert_same(model.state_dict(), plain.state_dict())


def test_uniform_gates_train_experts_alone(tmp_path):
    model, phases = build("bert", attention_type="mae", mae_gate_type="uniform"), []
    model.register_forward_pre_hook(lambda *_: phases.append(model.mae_phase))
    run("bert", model, tmp_path, max_steps=2)
    assert phases == ["expert"] * 2


def test_phase_is_left_after_an_error(tmp_path):
    model = build("bert", attention_type="mae")
    made = trainer("bert", model, tmp_path, **PLAIN_SGD)
    made.add_callback(type("Stop", (TrainerCallback,), {"on_step_end": _interrupt})())
    with pytest.raises(KeyboardInterrupt):
        made.train()
    assert model.mae_phase == "mixture"


def _interrupt(*args, **kwargs):
    raise KeyboardInterrupt
