"""What trackers get: numbers of each budget, the noise, histograms of the gates; in one event file."""

import re
import types

import pytest
from families import CASE
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from training_runs import build, rows
from transformers import TrainerCallback

from hf_moa import upcycle
from hf_moa.training import MoaTrainer, MoaTrainingArguments, evaluate_budgets
from hf_moa.training.trackers import report_histograms


def trainer_of(folder, name="bert", **fields):
    arguments = MoaTrainingArguments(
        str(folder), max_steps=4, logging_steps=2, per_device_train_batch_size=4, use_cpu=True,
        report_to="tensorboard", save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    data = list(rows(name))
    return MoaTrainer(
        build(name, **fields),
        arguments,
        train_dataset=data,
        eval_dataset=data,
        compute_metrics=lambda p: {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())},
    )


def events_of(folder):
    (path,) = folder.rglob("events.out.tfevents.*")  # one
    found = EventAccumulator(str(path), size_guidance={"scalars": 0, "histograms": 0})
    found.Reload()
    return found


def test_one_file_has_training_budgets_and_histograms(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where transformers' callback would write without a training
    trainer = trainer_of(tmp_path / "out", attention_type="mae", cct_budgets=[1, 0.5])
    trainer.evaluate()
    trainer.train()
    rows = evaluate_budgets(trainer)
    trainer.evaluate()
    events = events_of(tmp_path)
    for row in rows:
        (logged,) = events.Scalars(f"eval/budget_{row['budget']:g}_accuracy")
        assert logged.value == pytest.approx(row["eval_accuracy"])
        assert logged.step == 4
        (logged,) = events.Scalars(f"eval/budget_{row['budget']:g}_compute_fraction")
        assert logged.value == pytest.approx(row["compute_fraction"])
    noise = [event.value for event in events.Scalars("train/cct_noise_scale")]
    assert noise == pytest.approx([5 / 4, 5 * 3 / 4])  # of the steps 1 and 3 of 4
    for name in ("train/gate_entropy", "train/MAE_gate_load/layer_0", "train/MAE_gate_load/layer_1"):
        histograms = events.Histograms(name)
        assert [each.step for each in histograms] == [2, 4]
    entropies = events.Histograms("train/gate_entropy")[-1].histogram_value
    assert entropies.num == 2  # layers
    (mean,) = [e.value for e in events.Scalars("train/gate_entropy") if e.step == 4]
    assert entropies.sum / 2 == pytest.approx(mean, rel=1e-5)
    loads = events.Histograms("train/MAE_gate_load/layer_0")[-1].histogram_value
    assert loads.num == 4
    assert loads.sum == pytest.approx(4, rel=1e-5)


def test_routers_loads_are_histograms(tmp_path):
    trainer = trainer_of(tmp_path, attention_type="moa", ffn_type="moe", num_ffn_experts=4)
    trainer.train()
    events = events_of(tmp_path)
    for layer, shares in enumerate(trainer.expert_load["attention"]):
        found = events.Histograms(f"train/attention_load/layer_{layer}")[-1].histogram_value
        assert found.max == pytest.approx(max(shares) * len(shares))
    assert events.Histograms("train/feed_forward_load/layer_1")


def test_a_second_training_goes_on_in_the_file(tmp_path):
    trainer = trainer_of(tmp_path, attention_type="mae")
    trainer.train()
    trainer.args.max_steps = 6
    trainer.train()
    assert len(events_of(tmp_path).Scalars("train/loss")) == 5


def test_trials_of_a_search_have_files_of_their_own(tmp_path):
    trainer = trainer_of(tmp_path, attention_type="mae")
    (callback,) = (c for c in trainer.callback_handler.callbacks if hasattr(c, "tb_writer"))
    for trial in ("first", "second"):
        trainer.state.is_hyper_param_search, trainer.state.trial_name = True, trial
        state = trainer.state
        callback.on_train_begin(trainer.args, state, trainer.control)
        callback.on_log(trainer.args, state, trainer.control, logs={"loss": 1.0})
        callback.on_train_end(trainer.args, state, trainer.control)
    assert {path.parent.name for path in tmp_path.rglob("events.out.tfevents.*")} == {"first", "second"}


def test_pairs_of_budgets_have_names(tmp_path):
    trainer = trainer_of(tmp_path, "t5", cct_budgets=[[1, 1], [1, 0.5]])
    trainer.compute_metrics = None
    evaluate_budgets(trainer)
    logged = trainer.state.log_history[-1]
    assert {"eval_budget_1_1_loss", "eval_budget_1_0.5_loss"} <= set(logged)


def test_weights_and_biases_gets_its_own_histograms():
    """By a stand-in: the library is not installed here."""
    logged = []
    wandb = types.SimpleNamespace(run=object(), Histogram=tuple, log=logged.append)
    callback = TrainerCallback()
    callback._wandb = wandb
    report_histograms([callback, TrainerCallback()], {"gate_entropy": [1.0, 2.0]}, step=7)
    assert logged == [{"train/gate_entropy": (1.0, 2.0), "train/global_step": 7}]
    wandb.run = None  # not begun
    report_histograms([callback], {"gate_entropy": [1.0]}, step=8)
    assert len(logged) == 1


@pytest.mark.parametrize(
    ("logged", "said"),
    [
        ([{"compute_fraction_0.5": 1.0}, {"compute_fraction_0.5": 0.72}], "0.72 at budget 0.5"),
        ([{"compute_fraction_0.5": 0.9}, {"compute_fraction_0.5": 0.55}], ""),
        ([{"loss": 1.0}], ""),
    ],
)
def test_training_warns_of_gates_that_do_not_obey(logged, said, tmp_path, caplog):
    trainer = trainer_of(tmp_path, cct_budgets=[1, 0.5])
    trainer.state.log_history = logged
    trainer._warn_of_excess()
    assert (said in caplog.text) if said else ("more than" not in caplog.text)


def test_a_whole_training_warns_in_the_end(tmp_path, caplog):
    """Gates that start open, and do not learn."""
    model = upcycle(CASE["BertForSequenceClassification"].build_plain(), cct_budgets=[1, 0.5])
    arguments = MoaTrainingArguments(
        str(tmp_path), max_steps=4, logging_steps=4, learning_rate=0.0, budget_bias_learning_rate=1e-9,
        per_device_train_batch_size=8, use_cpu=True, report_to="none", save_strategy="no",
    )  # fmt: skip
    MoaTrainer(model, arguments, train_dataset=list(rows("bert"))).train()
    assert re.search(r"compute (1\.00|0\.9\d) at budget 0\.5: more than 0\.1 above", caplog.text)
