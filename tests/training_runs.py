"""Tiny training runs for the tests of the trainers."""

from __future__ import annotations

import torch
from common import batch, randomize
from families import CASE
from transformers import BertConfig, BertForSequenceClassification

from hf_moa.training import MoaSeq2SeqTrainingArguments, MoaTrainer, MoaTrainingArguments

CLASSES = {
    "bert": CASE["BertForSequenceClassification"],
    "bert-lm": CASE["BertForMaskedLM"],
    "gpt2": CASE["GPT2LMHeadModel"],
    "t5": CASE["T5ForConditionalGeneration"],
}
VARIANTS = {
    "mha": {},
    "mae": {"attention_type": "mae"},
    "moa": {"attention_type": "moa", "router_type": "noisy_topk", "ffn_type": "moe"},
    "mae-cct": {"attention_type": "mae", "cct_budgets": [1, 0.5]},
}
Z_LOSS_ALONE = {  # the balance loss, a product of two means, is no sum over micro-batches
    "attention_type": "moa",
    "router_balance_loss_coef": 0.0,
    "router_z_loss_coef": 1.0,
}
# Updates are gradients times -1, so that equal models mean equal gradients.
PLAIN_SGD = {
    "learning_rate": 1.0,
    "optim": "sgd",
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0,
    "weight_decay": 0.0,
}


def build(name, *, dropout=False, seed=0, **fields):
    case = CLASSES[name]
    torch.manual_seed(seed)
    fields = fields if dropout else case.family.no_dropout | fields
    return randomize(case.gated(case.config(**fields)))


def rows(name, count=8, length=12):
    """Rows without padding, all labelled."""
    ids, _ = batch(batch_size=count, length=length)
    ids[:, -1] = 1
    for b in range(count):
        row = {"input_ids": ids[b], "attention_mask": torch.ones(length, dtype=torch.long)}
        yield row | {"labels": torch.tensor(b % 3) if name == "bert" else ids[b].clone()}


def uneven_rows(name, lengths=range(4, 12)):
    """Rows of these lengths in turns (in a decoder too, but not at once), with few labels."""
    for b, row in enumerate(rows(name)):
        length = lengths[b % len(lengths)]
        row["attention_mask"] = (torch.arange(12) < length).long()
        if name != "bert":
            last = lengths[-1 - b % len(lengths)] if name == "t5" else length
            place = torch.arange(12)
            is_labelled = (place % (1 + b % 3) == 0) & (place < last) | (place == last - 1)
            row["labels"][~is_labelled] = -100
        yield row


def trainer(name, model, folder, *, trainer_class=MoaTrainer, data=None, teacher=None, **arguments):
    settings = {
        "max_steps": 1,
        "per_device_train_batch_size": 4,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
    }
    seq2seq = trainer_class.__name__ == "MoaSeq2SeqTrainer"
    arguments_class = MoaSeq2SeqTrainingArguments if seq2seq else MoaTrainingArguments
    data = list(rows(name)) if data is None else data
    return trainer_class(
        model=model,
        args=arguments_class(str(folder), **settings | arguments),
        train_dataset=data,
        eval_dataset=data,
        teacher=teacher,
    )


def run(name, model, folder, **arguments):
    made = trainer(name, model, folder, **arguments)
    made.train()
    return made


def gates(model):
    return {n: p.detach().clone() for n, p in model.named_parameters() if ".mixture.gate." in n}


def experts(model):
    return {n: p.detach().clone() for n, p in model.named_parameters() if ".mixture.gate." not in n}


def assert_same(actual, expected):
    """Bit for bit."""
    assert set(actual) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


def tensors(model):
    return dict([*model.named_parameters(), *model.named_buffers()])


def logged(made):
    return [entry for entry in made.state.log_history if "loss" in entry]


def plain_classifier(**fields):
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    return BertForSequenceClassification(BertConfig(vocab_size=67, num_labels=3, **sizes, **fields))
