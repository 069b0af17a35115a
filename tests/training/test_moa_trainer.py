"""`MoaTrainer`: exact updates, its logs, and what else a `Trainer` does."""

import math

import optuna
import pytest
import torch
from training_runs import (
    CLASSES,
    PLAIN_SGD,
    VARIANTS,
    Z_LOSS_ALONE,
    assert_same,
    build,
    experts,
    gates,
    logged,
    plain_classifier,
    rows,
    run,
    tensors,
    trainer,
)

from hf_moa.training import (
    CCTNoiseCallback,
    MoaSeq2SeqTrainer,
    MoaTrainer,
    MoaTrainingArguments,
)


@pytest.mark.covering(pairs=True)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("fields", [{}, Z_LOSS_ALONE], ids=["mha", "moa"])
@pytest.mark.parametrize("name", CLASSES)
def test_accumulation_changes_no_gradient(name, fields, smoothing, tmp_path):
    models = []
    for batch_size, accumulation in ((8, 1), (2, 4)):
        model = build(name, **fields)
        run(
            name,
            model,
            tmp_path,
            per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=accumulation,
            label_smoothing_factor=smoothing,
            **PLAIN_SGD,
        )
        models.append(model.state_dict())
    for key, tensor in models[0].items():
        torch.testing.assert_close(models[1][key], tensor, atol=3e-5, rtol=1e-5, msg=key)


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradient_checkpointing_changes_nothing(variant, tmp_path):
    models = []
    for checkpointing in (False, True):
        model = build("bert", dropout=True, **VARIANTS[variant])
        run("bert", model, tmp_path, max_steps=3, gradient_checkpointing=checkpointing, **PLAIN_SGD)
        models.append(tensors(model))
    for key, tensor in models[0].items():  # statistics of batch normalisation included
        torch.testing.assert_close(models[1][key], tensor, atol=1e-6, rtol=1e-5, msg=key)


def test_bfloat16_trains_as_float32_does(tmp_path):
    """Up to its precision: nothing is drawn but the budgets, which are the same. In small steps, so that
    the first update's rounding does not grow."""
    losses = {}
    for bf16 in (False, True):
        made = run(
            "bert",
            build("bert", **VARIANTS["mae-cct"]),
            tmp_path,
            bf16=bf16,
            mae_training="joint",
            max_steps=4,
            learning_rate=1e-3,
            logging_strategy="steps",
            logging_steps=1,
            logging_nan_inf_filter=False,
        )
        losses[bf16] = [entry["loss"] for entry in logged(made)]
    assert losses[True] != losses[False]
    assert losses[True] == pytest.approx(losses[False], rel=1e-2)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("training", ["bcd", "joint"])
def test_clipping_is_of_all_that_the_optimiser_has(training, accumulation, tmp_path):
    """In block coordinate descent, of only the experts: the gates' step is as long as it is."""
    model = build("bert", dropout=True, **VARIANTS["mae"])
    before = {"experts": experts(model), "gates": gates(model)}
    run("bert", model, tmp_path, mae_training=training, gradient_accumulation_steps=accumulation,
        **PLAIN_SGD | {"max_grad_norm": 0.01})  # fmt: skip
    after = {"experts": experts(model), "gates": gates(model)}
    moved = {
        part: math.hypot(*(float((after[part][name] - p).norm()) for name, p in before[part].items()))
        for part in before
    }
    if training == "bcd":
        assert moved["experts"] == pytest.approx(0.01, rel=1e-4)
        assert moved["gates"] > 0.1
    else:
        assert math.hypot(*moved.values()) == pytest.approx(0.01, rel=1e-4)
        assert moved["gates"] > 0


def test_logs_of_routers(tmp_path):
    model = build("bert-lm", **VARIANTS["moa"])
    made = run(
        "bert-lm",
        model,
        tmp_path,
        max_steps=2,
        logging_strategy="steps",
        logging_steps=1,
        gradient_accumulation_steps=2,
        **PLAIN_SGD | {"learning_rate": 0.0},
    )
    first, second = logged(made)
    names = {"router_balance_loss", "router_z_loss", "router_importance_loss", "router_load_loss"}
    assert {*names, "task_loss", "expert_load_max", "feed_forward_expert_load_min"} <= set(first)
    coefficients = {"router_balance_loss": 0.01, "router_z_loss": 0.001}
    aux = sum(coefficient * first[key] for key, coefficient in coefficients.items())
    assert first["loss"] == pytest.approx(first["task_loss"] + aux, rel=1e-4)
    assert first["expert_load_max"] >= 1 >= first["expert_load_min"]
    assert first["router_z_loss"] != second["router_z_loss"]  # noise


def test_logs_of_gates_and_compute(tmp_path):
    model = build("t5", attention_type="mae", cct_budgets=[[1, 1], [1, 0.5]], cct_budget_loss_coef=1.0)
    made = run("t5", model, tmp_path, max_steps=4, logging_strategy="steps", logging_steps=2)
    for entry in logged(made):
        for half in ("encoder", "decoder", "cross"):
            assert 0 < entry[f"{half}_gate_entropy"] <= math.log(4) + 1e-6
        assert 0 <= entry["compute_fraction_1_1"] <= 1
        assert 0 <= entry["compute_fraction_1_0.5"] <= 1
        total = entry["encoder_budget_loss"] + entry["decoder_budget_loss"]
        assert entry["loss"] == pytest.approx(entry["task_loss"] + total, rel=1e-4)


def test_noise_grows_with_the_steps(tmp_path):
    model, scales = build("bert", cct_budgets=[1, 0.5]), []
    module = model.bert.encoder.layer[0].attention.self.cct.control
    model.register_forward_pre_hook(lambda *_: scales.append(float(module.noise_scale)))
    run("bert", model, tmp_path, max_steps=5, cct_noise_steps=4)
    assert scales == [0.0, 1.25, 2.5, 3.75, 5.0]
    scales.clear()
    run("bert", model, tmp_path, max_steps=4, cct_noise_steps=0.5)
    assert scales == [0.0, 2.5, 5.0, 5.0]
    scales.clear()
    run("bert", model, tmp_path, max_steps=5)
    assert scales == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_noise_of_hard_gates_falls(tmp_path):
    model, scales = build("bert", cct_budgets=[1, 0.5], cct_gate_training="hard", cct_noise_max=9.0), []
    module = model.bert.encoder.layer[0].attention.self.cct.control
    model.register_forward_pre_hook(lambda *_: scales.append(float(module.noise_scale)))
    made = run("bert", model, tmp_path, max_steps=10)
    assert made.cct_noise_steps == 0.9
    assert scales == [9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.0]
    scales.clear()
    run("bert", model, tmp_path, max_steps=3, cct_noise_steps=-1)
    assert scales == [9.0, 6.0, 3.0]


def test_noise_is_left_to_a_callback(tmp_path):
    model, scales = build("bert", cct_budgets=[1, 0.5]), []
    module = model.bert.encoder.layer[0].attention.self.cct.control
    model.register_forward_pre_hook(lambda *_: scales.append(float(module.noise_scale)))
    made = trainer("bert", model, tmp_path, max_steps=3)
    made.add_callback(CCTNoiseCallback(num_steps=1))
    made.train()
    assert made.cct_noise_steps is None
    assert scales == [0.0, 5.0, 5.0]
    made.args.cct_noise_steps = 2
    with pytest.raises(ValueError, match="must be None beside a CCTNoiseCallback"):
        made.train()


def test_models_of_transformers_train_too(tmp_path):
    made = run("bert", plain_classifier(), tmp_path, cct_noise_steps=None)
    assert made.state.global_step == 1


def test_model_init_trains_anew(tmp_path):
    """As hyperparameter searches use it, which also change the arguments."""
    arguments = MoaTrainingArguments(
        str(tmp_path), max_steps=1, use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True
    )
    made = MoaTrainer(
        model_init=lambda: build("bert", attention_type="mae"),
        args=arguments,
        train_dataset=list(rows("bert")),
    )
    made.train()
    first = tensors(made.model)
    made.train()
    assert_same(tensors(made.model), first)
    made.args.gate_learning_rate = 0.1
    made.train()
    name = next(name for name in first if ".mixture.gate.norm.weight" in name)
    assert not torch.equal(tensors(made.model)[name], first[name])
    made.args.gate_learning_rate = 0.0
    with pytest.raises(ValueError, match="gate_learning_rate"):
        made.train()


def test_search_goes_on_after_a_trial_that_diverges(tmp_path):
    arguments = MoaTrainingArguments(
        str(tmp_path), max_steps=2, max_grad_norm=0.0, use_cpu=True, report_to="none",
        save_strategy="no", eval_strategy="steps", eval_steps=2, disable_tqdm=True,
    )  # fmt: skip
    made = MoaTrainer(
        model_init=lambda: build("bert", attention_type="mae"),
        args=arguments,
        train_dataset=list(rows("bert")),
        eval_dataset=list(rows("bert")),
    )
    rates = [1e-4, 1e-3, 1e30]
    best = made.hyperparameter_search(
        hp_space=lambda trial: {"learning_rate": trial.suggest_categorical("learning_rate", rates)},
        sampler=optuna.samplers.GridSampler({"learning_rate": rates}, seed=0),
        n_trials=3,
        backend="optuna",
    )
    assert best.hyperparameters["learning_rate"] < 1
    (diverged,) = tmp_path.glob("run-*/diverged-*/model.safetensors")
    assert diverged.parents[1].name != f"run-{best.run_id}"
    assert not list(tmp_path.glob("diverged-*"))


def test_seq2seq_trainer_generates(tmp_path):
    model = build("t5", attention_type="mae")
    made = trainer("t5", model, tmp_path, trainer_class=MoaSeq2SeqTrainer, predict_with_generate=True)
    made.train()
    prediction = made.predict(made.eval_dataset, max_length=7)
    assert prediction.predictions.shape[0] == 8
    assert (prediction.predictions[:, 7:] == 0).all()
    assert model.mae_phase == "mixture"


def test_norms_of_feed_forward_parts_do_not_decay(tmp_path):
    model = build("t5", cct_budgets=[1, 0.5], cct_sublayer_norm=True)
    names = trainer("t5", model, tmp_path).get_decay_parameter_names(model)
    norms = [name for name, parameter in model.named_parameters() if parameter.ndim == 1]
    assert any(".input_norms." in name for name in norms)
    assert not set(names) & set(norms)
