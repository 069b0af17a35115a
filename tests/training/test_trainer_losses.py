"""The loss of `MoaTrainer`: smoothed labels, losses of the user, auxiliary losses beside them."""

import pytest
import torch
from families import CASE
from training_runs import CLASSES, PLAIN_SGD, Z_LOSS_ALONE, build, plain_classifier, rows, trainer
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from hf_moa.training import MoaTrainer, MoaTrainingArguments


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("fields", [{}, {"attention_type": "moa"}], ids=["mha", "moa"])
@pytest.mark.parametrize("name", CLASSES)
def test_smoothed_loss_is_the_definition(name, fields, training, tmp_path):
    """`(1 - e) * nll + e * mean(-log p)` over the labels, shifted where the model shifts them; in eval
    `nll`, so that losses compare."""
    model = build(name, **fields).double().train(training)
    made = trainer(name, model, tmp_path, label_smoothing_factor=0.2)
    inputs = made.data_collator(list(rows(name)))
    if name != "bert":
        inputs["labels"][2, 5:] = -100
    actual = made.compute_loss(model, dict(inputs))
    outputs = model(**inputs)
    logits, labels = outputs.logits, inputs["labels"]
    if name == "gpt2":
        logits, labels = logits[:, :-1], labels[:, 1:]
    valid = labels != -100
    log_p = logits.log_softmax(-1)[valid]
    nll = -log_p.gather(-1, labels[valid].unsqueeze(-1)).mean()
    expected = 0.8 * nll + 0.2 * (-log_p).mean() if training else nll
    if fields and training:
        expected = expected + outputs.aux_loss
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("accumulation", [1, 2, 4])
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_smoothing_of_a_plain_model_is_the_plain_trainers(name, accumulation, tmp_path):
    updates = []
    for trainer_class, arguments_class in (
        (MoaTrainer, MoaTrainingArguments),
        (Trainer, TrainingArguments),
    ):
        torch.manual_seed(0)
        if name == "gpt2":
            sizes = {"n_embd": 32, "n_layer": 1, "n_head": 4, "vocab_size": 67}
            dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
            model = GPT2LMHeadModel(GPT2Config(**sizes, **dropout))
        else:
            model = plain_classifier(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        arguments = arguments_class(
            str(tmp_path), max_steps=1, use_cpu=True, report_to="none", save_strategy="no",
            per_device_train_batch_size=8 // accumulation, label_smoothing_factor=0.3,
            gradient_accumulation_steps=accumulation, **PLAIN_SGD,
        )  # fmt: skip
        trainer_class(model, arguments, train_dataset=list(rows(name))).train()
        updates.append(model.state_dict())
    for key, tensor in updates[0].items():
        torch.testing.assert_close(tensor, updates[1][key], atol=1e-6, rtol=1e-5, msg=key)


def test_smoothed_loss_of_the_labelled_tokens_alone_is_the_same(tmp_path):
    found = []
    for sparse in (False, True):
        model = build("bert-lm", attention_type="moa", sparse_prediction=sparse).double().train()
        made = trainer("bert-lm", model, tmp_path, label_smoothing_factor=0.2)
        inputs = made.data_collator(list(rows("bert-lm")))
        inputs["labels"][:, ::2] = -100
        torch.manual_seed(1)
        found.append(made.compute_loss(model, dict(inputs)))
    torch.testing.assert_close(found[1], found[0])


def test_smoothing_needs_labels(tmp_path):
    model = CASE["BertForQuestionAnswering"].build()
    data = [
        {"input_ids": row["input_ids"], "start_positions": 1, "end_positions": 2} for row in rows("bert")
    ]
    made = trainer("bert", model, tmp_path, data=data, label_smoothing_factor=0.1)
    with pytest.raises(ValueError, match="label_smoothing_factor needs `labels`"):
        made.train()


@pytest.mark.parametrize("accumulation", [1, 2])
def test_loss_function_of_the_user_has_auxiliary_losses_beside_it(accumulation, tmp_path):
    """A function that is the model's own loss gives the model's own updates."""

    def token_mean(outputs, labels, num_items_in_batch=None):
        total = torch.nn.functional.cross_entropy(
            outputs["logits"].flatten(0, 1), labels.flatten(), reduction="sum"
        )
        return total / num_items_in_batch

    models = []
    for function in (None, token_mean):
        model = build("bert-lm", **Z_LOSS_ALONE)
        made = trainer("bert-lm", model, tmp_path, gradient_accumulation_steps=accumulation, **PLAIN_SGD)
        if function is not None:
            made = MoaTrainer(
                model, made.args, train_dataset=made.train_dataset, compute_loss_func=function
            )
        made.train()
        models.append(model.state_dict())
    for key, tensor in models[0].items():
        torch.testing.assert_close(models[1][key], tensor, atol=2e-5, rtol=1e-5, msg=key)


@pytest.mark.parametrize("accumulation", [2, 4])
def test_mean_of_the_user_has_the_mean_of_the_auxiliary_losses(accumulation, tmp_path):
    """Where `loss_is_scaled_for_ga` says that `Trainer` takes the mean over the micro-batches."""

    def mean(outputs, labels, num_items_in_batch=None):
        return torch.nn.functional.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten())

    models = []
    for steps in (1, accumulation):
        model = build("bert-lm", **Z_LOSS_ALONE)
        made = trainer("bert-lm", model, tmp_path, gradient_accumulation_steps=steps,
                       per_device_train_batch_size=8 // steps, **PLAIN_SGD)  # fmt: skip
        made = MoaTrainer(model, made.args, train_dataset=made.train_dataset, compute_loss_func=mean)
        made.loss_is_scaled_for_ga = False
        made.train()
        models.append(model.state_dict())
    for key, tensor in models[0].items():
        torch.testing.assert_close(models[1][key], tensor, atol=2e-5, rtol=1e-5, msg=key)


def test_smoothing_needs_classes(tmp_path):
    model = build("bert", num_labels=1)
    data = [row | {"labels": torch.tensor(0.5)} for row in rows("bert")]
    made = trainer("bert", model, tmp_path, data=data, label_smoothing_factor=0.1)
    with pytest.raises(ValueError, match="label_smoothing_factor"):
        made.train()
