"""Distillation: its losses against the equations, on every head; teachers, caches, resumption."""

import copy
import math

import pytest
import torch
from datasets import Dataset
from families import CASE, each_head
from training_runs import (
    CLASSES,
    PLAIN_SGD,
    assert_same,
    build,
    gates,
    logged,
    plain_classifier,
    rows,
    run,
    tensors,
    trainer,
    uneven_rows,
)
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from hf_moa.training import MoaTrainer

W, T, V = 0.3, 1.7, 0.6
SETTINGS = {
    "distillation_weight": W,
    "distillation_temperature": T,
    "distillation_hidden_weight": V,
}
LOGITS_ONLY = {"distillation_hidden_weight": 0.0}


# --- from the equations -------------------------------------------------------------------------------


def kl(student, teacher, temperature=T):
    """`T^2 sum_c p_c log(p_c / q_c)` of each distribution, by exponentials."""
    p, q = (torch.exp(x / temperature) for x in (teacher, student))
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    return temperature**2 * (p * torch.log(p / q)).sum(-1)


def relative_error(hidden, target, mask):
    """`sum(m (h - t)^2) / sum(m t^2)`, position by position."""
    error = scale = 0
    for b, t in torch.argwhere(mask.bool()).tolist():
        error = error + ((hidden[b, t] - target[b, t]) ** 2).sum()
        scale = scale + (target[b, t] ** 2).sum()
    return error / scale


def rows_of(case, outputs, labels):
    """The distributions that are compared, `[n, classes]` each."""
    if case.task == "QuestionAnswering":
        return [outputs.start_logits, outputs.end_logits]
    if case.task == "LMHead":
        return [outputs.logits[:, :-1][labels["labels"][:, 1:] != -100]]
    if case.task in ("ConditionalGeneration", "MaskedLM", "TokenClassification"):
        return [outputs.logits[labels["labels"] != -100]]
    return [outputs.logits]


def errors_of(case, ours, theirs, inputs, labels):
    mask = inputs["attention_mask"].flatten(0, -2)
    if "decoder_hidden_states" not in ours:
        return [relative_error(ours.hidden_states[-1], theirs.hidden_states[-1], mask)]
    decoder_mask = mask
    if case.task == "ConditionalGeneration":
        decoder_mask = torch.ones(labels["labels"].shape)
        decoder_mask[1, 4:] = 0  # behind the last label
    names = {"encoder_hidden_states": mask, "decoder_hidden_states": decoder_mask}
    return [relative_error(ours[n][-1], theirs[n][-1], m) for n, m in names.items()]


def model_and_teacher(case, **fields):
    """In training mode without dropout, in float64; and a plain teacher."""
    no_dropout = case.family.no_dropout
    if case.plain_name == "GPT2ForTokenClassification":
        no_dropout = no_dropout | {"classifier_dropout": 0.0}
    model = case.build(**no_dropout | fields).double().train()
    plain = {name: value for name, value in no_dropout.items() if not name.startswith("mae_")}
    return model, case.build_plain(seed=5, **plain).double()


def gradients(loss, model):
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return {
        name: torch.zeros_like(p) if grad is None else grad
        for (name, p), grad in zip(model.named_parameters(), found, strict=True)
    }


@pytest.mark.parametrize("fields", [{}, {"attention_type": "moa"}], ids=["mha", "moa"])
@each_head
def test_loss_and_gradients_are_the_equations(case, fields, tmp_path):
    model, teacher = model_and_teacher(case, **fields)
    inputs, labels = case.inputs(), case.labels()
    if case.task == "ConditionalGeneration":
        del inputs["decoder_input_ids"]
    made = trainer("bert", model, tmp_path, teacher=teacher, **SETTINGS)
    made.model_accepts_loss_kwargs = False
    actual = made.compute_loss(model, inputs | labels)

    ours = model(**inputs, **labels, output_hidden_states=True)
    own = {"labels": labels["labels"]} if case.task == "ConditionalGeneration" else {}
    with torch.no_grad():
        theirs = teacher(**inputs, **own, output_hidden_states=True)
    task = ours.loss if ours.get("task_loss") is None else ours.task_loss
    divergences = [
        kl(s, t).mean()
        for s, t in zip(rows_of(case, ours, labels), rows_of(case, theirs, labels), strict=True)
    ]
    errors = errors_of(case, ours, theirs, inputs, labels)
    expected = (
        (1 - W) * task
        + W * sum(divergences) / len(divergences)
        + V * sum(errors) / len(errors)
        + (ours.loss - task)
    )
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
    expected = gradients(expected, model)
    for name, gradient in gradients(actual, model).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-8, atol=1e-9, msg=name)


@pytest.mark.parametrize("kind", ["regression", "multi_label_classification"])
def test_loss_without_a_softmax(kind, tmp_path):
    """Regression: the mean of `(s - t)^2`. Several labels at once: divergences of Bernoulli
    variables."""
    case = CASE["BertForSequenceClassification"]
    outputs = 1 if kind == "regression" else 3
    model = case.build(num_labels=outputs, **case.family.no_dropout).double().train()
    teacher = case.build_plain(seed=5, num_labels=outputs).double()
    labels = torch.tensor([0.5, -1.0, 2.0]).double()
    labels = labels if outputs == 1 else torch.eye(3).double()
    made = trainer("bert", model, tmp_path, teacher=teacher, **SETTINGS | LOGITS_ONLY)
    actual = made.compute_loss(model, case.inputs() | {"labels": labels})
    ours, theirs = model(**case.inputs(), labels=labels), teacher(**case.inputs()).logits.detach()
    if outputs == 1:
        distance = ((ours.logits - theirs) ** 2).mean()
    else:
        p, q = (1 / (1 + torch.exp(-x / T)) for x in (theirs, ours.logits))
        distance = (p * torch.log(p / q) + (1 - p) * torch.log((1 - p) / (1 - q))).mean() * T**2
    expected = (1 - W) * ours.loss + W * distance
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
    expected = gradients(expected, model)
    for name, gradient in gradients(actual, model).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-8, atol=1e-9, msg=name)


@pytest.mark.parametrize("name", ["bert-lm", "gpt2", "t5"])
def test_loss_of_a_part_of_the_accumulated_batch(name, tmp_path):
    """Sums over labelled tokens, divided by the labels of all; the hidden states' by the part."""
    model = build(name).double().train()
    teacher = build(name, seed=5).double()
    made = trainer(name, model, tmp_path, teacher=teacher, **SETTINGS)
    inputs = made.data_collator(list(rows(name)))
    inputs["labels"][2, 5:] = -100
    labels = inputs["labels"][:, 1:] if name == "gpt2" else inputs["labels"]
    own, count = int((labels != -100).sum()), torch.tensor(1000)
    made.current_gradient_accumulation_steps = 1
    of_all = made.compute_loss(model, dict(inputs), num_items_in_batch=count)
    of_part = made.compute_loss(model, dict(inputs))
    torch.testing.assert_close(of_all, of_part * own / 1000, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("sparse", [False, True])
def test_smoothing_is_of_the_labels_loss(sparse, tmp_path):
    model = build("bert-lm", attention_type="moa", sparse_prediction=sparse).double().train()
    teacher = build("bert-lm", seed=5).double()
    made = trainer("bert-lm", model, tmp_path, teacher=teacher, label_smoothing_factor=0.2, **SETTINGS)
    inputs = made.data_collator(list(rows("bert-lm")))
    inputs["labels"][:, ::2] = -100
    actual = made.compute_loss(model, dict(inputs))
    model.config.sparse_prediction = False
    ours = model(**inputs, output_hidden_states=True)
    theirs = teacher(**inputs, output_hidden_states=True)
    valid = inputs["labels"] != -100
    log_p = ours.logits.log_softmax(-1)[valid]
    nll = -log_p.gather(-1, inputs["labels"][valid].unsqueeze(-1)).mean()
    mask = inputs["attention_mask"]
    expected = (
        (1 - W) * (0.8 * nll - 0.2 * log_p.mean())
        + W * kl(ours.logits[valid], theirs.logits[valid]).mean()
        + V * relative_error(ours.hidden_states[-1], theirs.hidden_states[-1], mask)
        + ours.aux_loss
    )
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def test_hidden_states_of_layers_by_pairs(tmp_path):
    model, teacher = build("bert").double().train(), build("bert", seed=5, num_hidden_layers=3).double()
    chosen = ["0", "1:2", "-1"]
    made = trainer("bert", model, tmp_path, teacher=teacher, distillation_weight=0.0,
                   distillation_hidden_states=chosen)  # fmt: skip
    inputs = made.data_collator(list(uneven_rows("bert")))
    actual = made.compute_loss(model, dict(inputs))
    ours = model(**inputs, output_hidden_states=True)
    theirs = teacher(**inputs, output_hidden_states=True).hidden_states
    errors = [
        relative_error(ours.hidden_states[i], theirs[j], inputs["attention_mask"])
        for i, j in ((0, 0), (1, 2), (2, 3))
    ]
    torch.testing.assert_close(actual, ours.loss + sum(errors) / 3, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("name", "fields", "weight"),
    [
        ("bert", {"cct_budgets": [0.5]}, 0.0),
        ("bert", {"attention_type": "mae"}, 1.0),
        ("gpt2", {"cct_budgets": [0.5]}, 1.0),  # a language model, which reads every token
    ],
)
def test_default_weight_of_hidden_states(name, fields, weight, tmp_path):
    """CCT's gates are free to leave out tokens that a classifier does not read."""
    model, teacher = build(name, **fields), build(name, seed=5)
    logs = {"logging_strategy": "steps", "logging_steps": 1}
    for given, expected in ({}, weight), ({"distillation_hidden_weight": V}, V):
        made = run(name, model, tmp_path, teacher=teacher, max_steps=1, **logs, **given)
        assert made.hidden_weight == expected
        assert ("hidden_loss" in logged(made)[0]) == (expected > 0)


# --- the trainer --------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_without_a_teacher_updates_are_the_plain_trainers_to_the_bit(name, accumulation, tmp_path):
    updates = []
    for trainer_class in (MoaTrainer, Trainer):
        torch.manual_seed(0)
        if name == "gpt2":
            config = GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=67)
            model = GPT2LMHeadModel(config)
        else:
            model = plain_classifier()
        settings = {
            "max_steps": 3, "use_cpu": True, "report_to": "none", "save_strategy": "no",
            "per_device_train_batch_size": 4 // accumulation, "weight_decay": 0.1,
            "gradient_accumulation_steps": accumulation, "learning_rate": 1e-3, "disable_tqdm": True,
        }  # fmt: skip
        arguments = (trainer_class is MoaTrainer and MoaTrainer.arguments_class) or TrainingArguments
        made = trainer_class(model, arguments(str(tmp_path), **settings), train_dataset=list(rows(name)))
        made.train()
        updates.append((tensors(model), logged(made)))
    assert_same(updates[0][0], updates[1][0])
    assert updates[0][1] == updates[1][1]


@pytest.mark.parametrize("name", CLASSES)
def test_accumulation_changes_no_gradient(name, tmp_path):
    models = []
    for batch_size, accumulation in ((8, 1), (2, 4)):
        model = build(name)
        run(name, model, tmp_path, teacher=build(name, seed=5), data=list(uneven_rows(name)),
            per_device_train_batch_size=batch_size, gradient_accumulation_steps=accumulation,
            **LOGITS_ONLY, **PLAIN_SGD)  # fmt: skip
        models.append(model.state_dict())
    for key, tensor in models[0].items():
        torch.testing.assert_close(models[1][key], tensor, atol=3e-5, rtol=1e-5, msg=key)


def test_teacher_is_left_as_it_is(tmp_path):
    teacher = build("bert", seed=5, dropout=True).train()
    before = copy.deepcopy(tensors(teacher))
    modes = []
    teacher.register_forward_hook(
        lambda module, *_: modes.append((module.training, torch.is_grad_enabled()))
    )
    model = build("bert", dropout=True)
    made = run(
        "bert", model, tmp_path, teacher=teacher, max_steps=2, save_strategy="steps", save_steps=1
    )
    assert modes == [(False, False)] * 2
    assert_same(tensors(teacher), before)
    assert all(p.requires_grad and p.grad is None for p in teacher.parameters())
    assert not any("teacher" in name for name in made.model.state_dict())
    assert {path.name for path in (tmp_path / "checkpoint-2").iterdir()} >= {"model.safetensors"}


@pytest.mark.parametrize("kind", ["plain", "gated"])
def test_teacher_of_a_path(kind, tmp_path):
    case = CASE["BertForSequenceClassification"]
    teacher = case.build(seed=5, cct_budgets=[1, 0.5]) if kind == "gated" else case.build_plain(seed=5)
    teacher.save_pretrained(tmp_path / "teacher")
    models = []
    for given in (teacher, str(tmp_path / "teacher"), tmp_path / "teacher"):
        model = build("bert")
        run("bert", model, tmp_path, teacher=given, **PLAIN_SGD)
        models.append(tensors(model))
    assert_same(models[1], models[0])
    assert_same(models[2], models[0])


def test_losses_are_logged(tmp_path):
    made = run("bert-lm", build("bert-lm", attention_type="moa"), tmp_path, max_steps=2,
               teacher=build("bert-lm", seed=5), gradient_accumulation_steps=2,
               logging_strategy="steps", logging_steps=1, per_device_train_batch_size=2)  # fmt: skip
    for entry in logged(made):
        aux = 0.01 * entry["router_balance_loss"] + 0.001 * entry["router_z_loss"]
        loss = 0.5 * entry["task_loss"] + 0.5 * entry["logits_loss"] + entry["hidden_loss"] + aux
        assert entry["loss"] == pytest.approx(loss, rel=1e-4)
        assert entry["hidden_loss"] > 0 < entry["logits_loss"]


def test_evaluation_is_of_the_labels(tmp_path):
    """So that losses of students, with whatever weights, compare."""
    found = []
    for teacher in (None, build("bert", seed=5)):
        made = trainer("bert", build("bert", attention_type="moa"), tmp_path, teacher=teacher)
        found.append(made.evaluate()["eval_loss"])
    assert found[0] == found[1]


def test_gates_learn_from_the_teacher_in_their_steps(tmp_path):
    moved = []
    for teacher in (None, build("bert", seed=5)):
        model = build("bert", attention_type="mae")
        before = gates(model)
        run("bert", model, tmp_path, teacher=teacher, mae_training="bcd", **PLAIN_SGD)
        moved.append({name: p - before[name] for name, p in gates(model).items()})
    assert any(step.any() for step in moved[1].values())
    assert not any(torch.allclose(moved[0][name], step) for name, step in moved[1].items() if step.any())


def test_gradient_checkpointing_changes_nothing(tmp_path):
    models = []
    for checkpointing in (False, True):
        model = build("bert", dropout=True, attention_type="moa")
        run("bert", model, tmp_path, max_steps=2, teacher=build("bert", seed=5),
            gradient_checkpointing=checkpointing, **PLAIN_SGD)  # fmt: skip
        models.append(tensors(model))
    for key, tensor in models[0].items():
        torch.testing.assert_close(models[1][key], tensor, atol=1e-6, rtol=1e-5, msg=key)


def test_bfloat16_trains_as_float32_does(tmp_path):
    losses = {}
    for bf16 in (False, True):
        made = run("bert", build("bert"), tmp_path, bf16=bf16, max_steps=3, learning_rate=1e-3,
                   teacher=build("bert", seed=5), logging_strategy="steps",
                   logging_steps=1)  # fmt: skip
        losses[bf16] = [entry[name] for entry in logged(made) for name in ("loss", "hidden_loss")]
    assert losses[True] != losses[False]
    assert losses[True] == pytest.approx(losses[False], rel=2e-2)


@pytest.mark.slow
def test_compiled_student_learns_the_same(tmp_path):
    torch._dynamo.reset()
    losses = {}
    for backend in (None, "aot_eager"):
        model = build("bert", num_hidden_layers=1)
        made = run("bert", model, tmp_path, torch_compile_backend=backend, max_steps=2,
                   teacher=build("bert", seed=5), logging_strategy="steps",
                   logging_steps=1)  # fmt: skip
        losses[backend] = [entry["loss"] for entry in logged(made)]
    assert losses["aot_eager"] == pytest.approx(losses[None], rel=1e-5)


# --- resumption and the cache -------------------------------------------------------------------------


class _StopAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == self.step


WAYS = {
    "teacher": {},
    "cache": {"distillation_cache": True, **LOGITS_ONLY},
    "teacher, all budgets": {"budget_sampling": "all"},
    "self": {},
}


@pytest.mark.covering
@pytest.mark.parametrize("stop", [1, 3])
@pytest.mark.parametrize("way", WAYS)
def test_resumption_is_bit_exact(way, stop, tmp_path):
    fields = {"attention_type": "mae", "cct_budgets": [1, 0.5], "cct_noise_max": 1.0}
    settings = {
        "num_train_epochs": 2,
        "max_steps": -1,
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 2,
        "gate_every_n_epochs": 2,
        "learning_rate": 1e-2,
        "save_strategy": "steps",
        "save_steps": 1,
        **WAYS[way],
    }

    def begin(folder, seed=0):
        teacher = "self" if way == "self" else build("bert", seed=5, dropout=True)
        model = build("bert", dropout=True, seed=seed, **fields)
        data = list(uneven_rows("bert"))
        return trainer("bert", model, tmp_path / folder, teacher=teacher, data=data, **settings)

    whole = begin("whole")
    whole.train()
    stopped = begin("parts")
    stopped.add_callback(_StopAt(stop))
    stopped.train()
    assert stopped.state.global_step == stop
    resumed = begin("parts", seed=7)
    torch.rand(5)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 4
    assert_same(tensors(resumed.model), tensors(whole.model))


def _as_dataset(data):
    columns = {name: [row[name].tolist() for row in data] for name in data[0]}
    return Dataset.from_dict(columns | {"text": ["..."] * len(data)})


@pytest.mark.parametrize("as_dataset", [False, True])
def test_cached_logits_train_as_those_computed_at_once(as_dataset, tmp_path):
    """Of each example its own, in whatever order they come."""
    models, calls = [], []
    for cached in (False, True):
        teacher = build("bert", seed=5)
        teacher.register_forward_hook(lambda *_: calls.append(1))
        model = build("bert")
        data = list(uneven_rows("bert"))
        data = _as_dataset(data) if as_dataset else data
        calls.clear()
        run("bert", model, tmp_path, data=data, teacher=teacher, distillation_cache=cached,
            max_steps=-1, num_train_epochs=3, per_device_eval_batch_size=4,
            **LOGITS_ONLY, **PLAIN_SGD | {"learning_rate": 0.05})  # fmt: skip
        models.append(tensors(model))
        assert len(calls) == (2 if cached else 6)  # 8 examples, batches of 4, 3 epochs
    for key, tensor in models[0].items():
        torch.testing.assert_close(models[1][key], tensor, atol=1e-5, rtol=1e-5, msg=key)


def test_cache_says_what_it_takes(tmp_path, caplog):
    caplog.set_level("INFO", logger="hf_moa.training")
    run("bert", build("bert"), tmp_path, teacher=build("bert", seed=5), distillation_cache=True,
        **LOGITS_ONLY)  # fmt: skip
    assert "for 8 examples of 3 numbers: 0.0 MiB on cpu" in caplog.text


def test_cache_is_not_for_tokens_or_streams(tmp_path):
    settings = {"distillation_cache": True, **LOGITS_ONLY}
    made = trainer("gpt2", build("gpt2"), tmp_path, teacher=build("gpt2", seed=5), **settings)
    with pytest.raises(ValueError, match=r"`\[B, classes\]` \(got logits of shape \(8, 12, 67\)"):
        made.train()
    data = _as_dataset(list(rows("bert")))
    made = trainer("bert", build("bert"), tmp_path, teacher=build("bert", seed=5),
                   data=data.to_iterable_dataset(), **settings)  # fmt: skip
    with pytest.raises(ValueError, match="needs a train_dataset with a length"):
        made.train()


# --- what does not go together ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"distillation_weight": 1.5}, r"distillation_weight must be a number in \[0, 1\] \(got 1.5\)"),
        ({"distillation_weight": True}, "distillation_weight must be a number"),
        ({"distillation_temperature": 0}, r"distillation_temperature must be .* above 0 \(got 0\)"),
        ({"distillation_temperature": math.nan}, "distillation_temperature must be a number"),
        ({"distillation_hidden_weight": -1}, "distillation_hidden_weight must be .* at least 0"),
        ({"distillation_hidden_states": []}, "distillation_hidden_states must be a list of layers"),
        ({"distillation_hidden_states": ["1:2:3"]}, "distillation_hidden_states must be a list"),
        ({"distillation_hidden_states": [0.5]}, "distillation_hidden_states must be a list"),
        ({"distillation_hidden_states": "-1"}, r"distillation_hidden_states must be .*got '-1'\)"),
        ({"distillation_cache": "yes"}, r"distillation_cache must be True or False \(got 'yes'\)"),
        ({"distillation_cache": True}, "Set distillation_hidden_weight to 0"),
        ({"budget_sampling": "sandwich"}, "budget_sampling must be 'draw', 'all' or None"),
    ],
)
def test_bad_arguments_are_errors(arguments, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        trainer("bert", build("bert"), tmp_path, teacher=build("bert", seed=5), **arguments)


def _teacher(**fields):
    sizes = {"vocab_size": 67, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    return BertForSequenceClassification(BertConfig(**sizes | {"num_labels": 3} | fields))


@pytest.mark.parametrize(
    ("teacher", "message"),
    [
        (lambda _: _teacher(hidden_size=64), "have 64 numbers, the model's 32.*hidden_weight to 0"),
        (lambda _: _teacher(vocab_size=80), "embeds another number of tokens, 80, not 67"),
        (lambda _: _teacher(label2id={"LABEL_1": 0, "LABEL_0": 1, "LABEL_2": 2},
                            id2label={0: "LABEL_1", 1: "LABEL_0", 2: "LABEL_2"}),
         "numbers the classes otherwise"),
        (lambda model: model, "shares parameters with the model"),
        (lambda model: _sharing(model), "shares parameters with the model"),
        (lambda _: build("t5"), "must have the model's is_encoder_decoder, False"),
        (lambda _: 3, r"must be a model, the path .*\(got int\)"),
        (lambda _: "self", r"needs a model with several.*got budgets \[\]"),
    ],
)  # fmt: skip
def test_teacher_must_go_with_the_model(teacher, message, tmp_path):
    model = build("bert")
    with pytest.raises(ValueError, match=message):
        trainer("bert", model, tmp_path, teacher=teacher(model))


def _sharing(model):
    teacher = build("bert", seed=5)
    teacher.bert.embeddings = model.bert.embeddings
    return teacher


def test_teacher_of_other_classes_is_an_error(tmp_path):
    made = trainer("bert", build("bert"), tmp_path, teacher=_teacher(num_labels=2))
    with pytest.raises(ValueError, match=r"logits must be of the model's shape, \(4, 3\) \(got \(4, 2"):
        made.train()


def test_wider_teacher_gives_its_logits(tmp_path):
    run("bert", build("bert"), tmp_path, teacher=_teacher(hidden_size=64), **LOGITS_ONLY)


def test_layers_that_there_are_not(tmp_path):
    made = trainer("bert", build("bert"), tmp_path, teacher=_teacher(),
                   distillation_hidden_states=["2"])  # fmt: skip
    with pytest.raises(ValueError, match=r"must name layers that there are \(got \[2\]\)"):
        made.train()


def test_settings_without_a_teacher_are_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"distillation_temperature=4\.0 needs a teacher"):
        trainer("bert", build("bert"), tmp_path, distillation_temperature=4.0)


def test_loss_of_the_user_is_another(tmp_path):
    args = trainer("bert", build("bert"), tmp_path).args
    with pytest.raises(ValueError, match="compute_loss_func"):
        MoaTrainer(build("bert"), args, teacher=_teacher(), compute_loss_func=lambda *_, **__: 0.0)
