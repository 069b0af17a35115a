"""A teacher's part in the loss, and steps at every budget."""

import pytest
import torch
from families import CASE
from training_runs import (
    CLASSES,
    PLAIN_SGD,
    assert_same,
    build,
    run,
    tensors,
    trainer,
    uneven_rows,
)

from hf_moa import upcycle
from hf_moa.training import MoaSeq2SeqTrainer, MoaTrainer
from hf_moa.training.distillation import Distillation, Targets

each_name = pytest.mark.parametrize("name", CLASSES)
NESTED = {"nested_budgets": [1, 0.5]}
CCT = {"cct_budgets": [1, 0.5], "cct_sublayer_norm": False}


def plain(name, seed=1):
    """A teacher: transformers' own model, without dropout."""
    case = CLASSES[name]
    return case.build_plain(
        seed=seed, **{k: v for k, v in case.family.no_dropout.items() if k[:3] != "mae"}
    )


def copies(model):
    return {name: tensor.detach().clone() for name, tensor in tensors(model).items()}


# --- the loss, from its equation --------------------------------------------------------------------


def softmax(x):
    x = torch.exp(x)
    return x / x.sum(dim=-1, keepdim=True)


def divergence(own, theirs, temperature):
    """Of `[n, classes]`, a mean over n."""
    p, q = softmax(theirs / temperature), softmax(own / temperature)
    return (p * (torch.log(p) - torch.log(q))).sum() / len(own) * temperature**2


def relative_error(own, theirs, mask):
    own, theirs = own[mask], theirs[mask]
    return ((own - theirs) ** 2).sum() / (theirs**2).sum()


def labelled(name, batch, logits):
    """The positions with a prediction for a label, `[n, classes]`."""
    labels = batch["labels"]
    if name == "bert":
        return logits
    if name == "gpt2":
        return logits[:, :-1][labels[:, 1:] != -100]
    return logits[labels != -100]


def examples_of(name):
    """Of different lengths. `Trainer` counts the label of GPT-2's first token, too: there is none."""
    examples = list(uneven_rows(name))
    for example in examples:
        if name == "gpt2":
            example["labels"][0] = -100
    return examples


def stacked(name):
    examples = examples_of(name)
    return {key: torch.stack([row[key] for row in examples]) for key in examples[0]}


@pytest.mark.parametrize("hidden_weight", [0.0, 0.7])
@each_name
def test_loss_equals_the_equation(name, hidden_weight):
    student, teacher = build(name).double().train(), plain(name).double()
    batch = stacked(name)
    outputs = student(**batch, output_hidden_states=True)
    with torch.no_grad():
        taught = teacher(**batch, output_hidden_states=True)
    distillation = Distillation(
        weight=0.3, temperature=3.0, hidden_weight=hidden_weight, shifts_labels=name == "gpt2"
    )
    actual = distillation.loss(outputs, Targets.of(taught), batch)
    again = student(**batch, output_hidden_states=True)
    expected = 0.7 * again.loss + 0.3 * divergence(
        labelled(name, batch, again.logits), labelled(name, batch, taught.logits), 3.0
    )
    if hidden_weight and name == "t5":
        masks = {"encoder": batch["attention_mask"].bool(), "decoder": batch["labels"] != -100}
        errors = [
            relative_error(*(x[f"{half}_hidden_states"][-1] for x in (again, taught)), mask)
            for half, mask in masks.items()
        ]
        expected = expected + hidden_weight * sum(errors) / 2
    elif hidden_weight:
        mask = batch["attention_mask"].bool()
        error = relative_error(again.hidden_states[-1], taught.hidden_states[-1], mask)
        expected = expected + hidden_weight * error
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-6)  # cross-entropy is in float32
    parameters = list(student.parameters())
    actual = torch.autograd.grad(actual, parameters, allow_unused=True)
    expected = torch.autograd.grad(expected, parameters, allow_unused=True)
    for got, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)


def test_answers_regressions_and_single_predictions():
    """Both ends of an answer; a regression's squared error; masked tokens whose logits are few."""
    distillation = Distillation(weight=1.0, temperature=2.0, hidden_weight=0.0, shifts_labels=False)
    generator = torch.Generator().manual_seed(0)

    def logits(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    own = {"start_logits": logits(3, 5), "end_logits": logits(3, 5), "loss": logits(1)[0]}
    theirs = {"start_logits": logits(3, 5), "end_logits": logits(3, 5)}
    expected = sum(divergence(own[name], theirs[name], 2.0) for name in theirs) / 2
    torch.testing.assert_close(distillation.loss(own, Targets.of(theirs), {}), expected)

    own, theirs = {"logits": logits(4, 1), "loss": logits(1)[0]}, {"logits": logits(4, 1)}
    found = distillation.loss(own, Targets.of(theirs), {"labels": logits(4)})
    torch.testing.assert_close(found, ((own["logits"] - theirs["logits"]) ** 2).mean())

    labels = torch.tensor([[-100, 3, -100], [2, -100, 1]])
    full, theirs = logits(2, 3, 7), {"logits": logits(2, 3, 7)}
    own = {"logits": full[labels != -100], "loss": logits(1)[0]}
    expected = divergence(own["logits"], theirs["logits"][labels != -100], 2.0)
    found = distillation.loss(own, Targets.of(theirs), {"labels": labels})
    torch.testing.assert_close(found, expected)


def test_auxiliary_losses_stay():
    model = build("bert", cct_budgets=[0.5]).train()
    batch = stacked("bert")
    distillation = Distillation(weight=1.0, temperature=1.0, hidden_weight=0.0, shifts_labels=False)
    outputs = model(**batch)
    found = distillation.loss(outputs, Targets.of(outputs), batch)
    torch.testing.assert_close(found, outputs.aux_loss)  # a teacher that agrees adds nothing else


# --- in the trainer ---------------------------------------------------------------------------------


@each_name
def test_a_step_goes_down_the_gradient_of_the_loss(name, tmp_path):
    student, teacher, batch = build(name), plain(name), stacked(name)
    before = copies(student)
    outputs = student.train()(**batch, output_hidden_states=True)
    with torch.no_grad():
        taught = teacher(**batch, output_hidden_states=True)
    loss = Distillation(
        weight=0.4, temperature=3.0, hidden_weight=2.0, shifts_labels=name == "gpt2"
    ).loss(outputs, Targets.of(taught), batch)
    loss.backward()
    wanted = {n: before[n] - p.grad for n, p in student.named_parameters() if p.grad is not None}
    fresh = build(name)
    run(
        name,
        fresh,
        tmp_path,
        data=examples_of(name),
        teacher=teacher,
        per_device_train_batch_size=8,
        distillation_weight=0.4,
        distillation_temperature=3.0,
        distillation_hidden_weight=2.0,
        **PLAIN_SGD,
    )
    for key, tensor in wanted.items():
        torch.testing.assert_close(tensors(fresh)[key], tensor, atol=3e-5, rtol=1e-5, msg=key)


@each_name
def test_accumulation_changes_no_gradient(name, tmp_path):
    models = []
    for batch_size, accumulation in ((8, 1), (2, 4)):
        model = build(name, **NESTED)
        run(
            name,
            model,
            tmp_path,
            teacher=plain(name),
            budget_sampling="all",
            distillation_hidden_weight=0.0,  # whose denominator is the batch's
            per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=accumulation,
            **PLAIN_SGD,
        )
        models.append(model.state_dict())
    for key, tensor in models[0].items():
        torch.testing.assert_close(models[1][key], tensor, atol=3e-5, rtol=1e-5, msg=key)


@pytest.mark.parametrize("fields", [NESTED, CCT], ids=["nested", "cct"])
@each_name
def test_all_budgets_in_a_step_are_the_mean_of_steps_at_each(name, fields, tmp_path):
    start, batch = copies(build(name, **fields)), stacked(name)
    steps = []
    for budget in (1, 0.5):
        model = build(name, **fields).train()
        model(**batch, budget=budget).loss.backward()
        steps.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    model = build(name, **fields)
    made = trainer(
        name,
        model,
        tmp_path,
        data=examples_of(name),
        budget_sampling="all",
        per_device_train_batch_size=8,
        **PLAIN_SGD,
    )
    made.train()
    for key, tensor in tensors(model).items():
        gradients = [step[key] for step in steps if key in step]
        wanted = start[key] - sum(gradients) / 2 if gradients else start[key]
        torch.testing.assert_close(tensor, wanted, atol=3e-5, rtol=1e-4, msg=key)


@each_name
def test_the_largest_budget_teaches_the_others(name, tmp_path):
    batch, start = stacked(name), copies(build(name, **NESTED))
    model = build(name, **NESTED).train()
    full = model(**batch, budget=1, output_hidden_states=True)
    half = model(**batch, budget=0.5, output_hidden_states=True)
    distillation = Distillation(
        weight=0.5, temperature=2.0, hidden_weight=1.0, shifts_labels=name == "gpt2"
    )
    loss = (full.loss + distillation.loss(half, Targets.of(full), batch)) / 2
    loss.backward()
    fresh = build(name, **NESTED)
    run(
        name,
        fresh,
        tmp_path,
        data=examples_of(name),
        teacher="self",
        budget_sampling="all",
        per_device_train_batch_size=8,
        **PLAIN_SGD,
    )
    for key, parameter in model.named_parameters():
        wanted = start[key] if parameter.grad is None else start[key] - parameter.grad
        torch.testing.assert_close(tensors(fresh)[key], wanted, atol=3e-5, rtol=1e-4, msg=key)


@pytest.mark.parametrize("teacher", ["self", "other"])
def test_resumed_runs_are_the_same_to_the_bit(teacher, tmp_path):
    def go(folder, **arguments):
        model = build("bert", dropout=True, **NESTED)
        made = trainer(
            "bert",
            model,
            tmp_path / folder,
            teacher="self" if teacher == "self" else plain("bert"),
            budget_sampling="all",
            save_strategy="steps",
            save_steps=2,
            **{"max_steps": 4} | arguments,
        )
        return made, model

    whole, expected = go("whole")
    whole.train()
    again, resumed = go("again")
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert_same(tensors(resumed), tensors(expected))


def test_a_teacher_comes_from_a_folder_and_learns_nothing(tmp_path):
    teacher = plain("bert")
    teacher.save_pretrained(tmp_path / "teacher")
    models = []
    for given in (str(tmp_path / "teacher"), teacher):
        model = build("bert")
        run("bert", model, tmp_path / "out", teacher=given, max_steps=2, **PLAIN_SGD)
        models.append(model)
    assert_same(*map(tensors, models))
    assert_same(tensors(teacher), tensors(plain("bert")))


def test_a_narrower_student_learns_the_logits_only(tmp_path, caplog):
    teacher = upcycle(CASE["BertForSequenceClassification"].build_plain(hidden_size=64))
    run("bert", build("bert"), tmp_path, teacher=teacher)
    assert "hidden states are of size 64, the student's of 32" in caplog.text


def test_evaluation_has_no_teacher(tmp_path):
    found = []
    for teacher in (None, plain("bert")):
        made = trainer("bert", build("bert"), tmp_path, teacher=teacher)
        found.append(made.evaluate()["eval_loss"])
    assert found[0] == found[1]


def test_sequence_to_sequence_trainers_have_teachers(tmp_path):
    models = []
    for trainer_class in (MoaTrainer, MoaSeq2SeqTrainer):
        model = build("t5")
        run("t5", model, tmp_path, trainer_class=trainer_class, teacher=plain("t5"), **PLAIN_SGD)
        models.append(model)
    assert_same(*map(tensors, models))


@pytest.mark.parametrize(
    ("fields", "arguments", "message"),
    [
        ({}, {"teacher": 3}, r"teacher must be a model, the folder .* \(got int\)"),
        (NESTED, {"teacher": "self"}, "teacher='self' needs budget_sampling='all'"),
        ({}, {"budget_sampling": "all"}, "budget_sampling='all' needs a model with budgets"),
        ({}, {"budget_sampling": "some"}, r"budget_sampling must be 'draw' or 'all' \(got 'some'\)"),
        ({}, {"distillation_weight": 1.5}, r"distillation_weight must be .* at most 1 \(got 1.5\)"),
        ({}, {"distillation_temperature": 0}, r"distillation_temperature must be a number above 0"),
        ({}, {"distillation_hidden_weight": -1}, "distillation_hidden_weight must be a number of at"),
        ({}, {"teacher": "plain", "label_smoothing_factor": 0.1}, "label_smoothing_factor must be 0"),
    ],
)
def test_what_does_not_go_together_is_refused(fields, arguments, message, tmp_path):
    if arguments.get("teacher") == "plain":
        arguments = {**arguments, "teacher": plain("bert")}
    with pytest.raises(ValueError, match=message):
        run("bert", build("bert", **fields), tmp_path, **arguments)


def test_a_teacher_of_other_labels_is_refused(tmp_path):
    teacher = CASE["BertForSequenceClassification"].build_plain(num_labels=5)
    with pytest.raises(ValueError, match=r"teacher must have the student's labels .*\(8, 3\)|\(4, 3\)"):
        run("bert", build("bert"), tmp_path, teacher=teacher)
    model = build("bert")
    with pytest.raises(ValueError, match="another model than the one that learns"):
        run("bert", model, tmp_path, teacher=model)
