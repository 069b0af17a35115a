"""Gated models under the plain `Trainer`: joint training with correct losses."""

import pytest
import torch
from common import batch, randomize, tiny_config
from transformers import Trainer, TrainingArguments

from hf_moa import MoaBertForMaskedLM, MoaBertForSequenceClassification

NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
Z_LOSS_ALONE = {
    "attention_type": "moa",
    "router_balance_loss_coef": 0.0,  # a product of two means is no sum over micro-batches
    "router_z_loss_coef": 1.0,
}


def rows(cls):
    ids, _ = batch(batch_size=8, length=12)
    for b in range(8):
        label = ids[b] if cls is MoaBertForMaskedLM else torch.tensor(b % 3)
        yield {"input_ids": ids[b], "attention_mask": torch.ones(12, dtype=torch.long), "labels": label}


def train(model, folder, **arguments):
    """Plain SGD without schedule or clipping: an update is the gradient times -1."""
    settings = {
        "learning_rate": 1.0,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0,
        "max_steps": 1,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    trainer = Trainer(
        model,
        TrainingArguments(str(folder), **settings | arguments),
        train_dataset=list(rows(type(model))),
        eval_dataset=list(rows(type(model))),
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    "cls", [MoaBertForMaskedLM, MoaBertForSequenceClassification], ids=lambda cls: cls.__name__
)
@pytest.mark.parametrize(
    "fields",
    [{}, {"attention_type": "mae", "mae_gate_type": "uniform"}, Z_LOSS_ALONE],
    ids=["mha", "uni-mae", "moa"],
)
def test_accumulation_changes_no_gradient(cls, fields, tmp_path):
    updates = []
    for batch_size, accumulation in ((8, 1), (2, 4)):
        torch.manual_seed(0)
        model = randomize(cls(tiny_config(**NO_DROPOUT | fields)))
        train(
            model,
            tmp_path,
            per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=accumulation,
        )
        updates.append(model.state_dict())
    for name, tensor in updates[0].items():
        torch.testing.assert_close(updates[1][name], tensor, atol=2e-5, rtol=1e-5, msg=name)


def test_predictions_carry_logits_alone(tmp_path):
    model = MoaBertForSequenceClassification(
        tiny_config(attention_type="mae", cct_budgets=[1, 0.5], output_expert_weights=True)
    )
    trainer = train(model, tmp_path)
    prediction = trainer.predict(trainer.eval_dataset)
    assert prediction.predictions.shape == (8, 3)


def test_stopped_and_resumed_run_is_bit_equal(tmp_path):
    """MAE with its batch normalisation, under AdamW."""
    settings = {"optim": "adamw_torch", "learning_rate": 1e-3, "per_device_train_batch_size": 4}

    def model():
        torch.manual_seed(0)
        return MoaBertForSequenceClassification(tiny_config(attention_type="mae"))

    whole, resumed = model(), model()
    train(whole, tmp_path / "whole", max_steps=6, **settings)
    train(model(), tmp_path / "part", max_steps=6, save_strategy="steps", save_steps=3, **settings)
    trainer = Trainer(
        resumed,
        TrainingArguments(
            str(tmp_path / "part"),
            max_steps=6,
            lr_scheduler_type="constant",
            max_grad_norm=0,
            use_cpu=True,
            save_strategy="no",
            disable_tqdm=True,
            **settings,
        ),
        train_dataset=list(rows(MoaBertForSequenceClassification)),
    )
    trainer.train(resume_from_checkpoint=str(tmp_path / "part" / "checkpoint-3"))
    for name, tensor in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], tensor), name
