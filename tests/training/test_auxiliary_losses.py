"""Auxiliary losses of accumulated batches: weighted by tokens, where rows and labels are uneven."""

import pytest
import torch
from training_runs import CLASSES, PLAIN_SGD, build, run, uneven_rows

from hf_moa.training import MoaTrainer
from hf_moa.training.auxiliary_losses import count_tokens

Z_LOSS = {"attention_type": "moa", "router_balance_loss_coef": 0.0, "router_z_loss_coef": 1.0}
SPLITS = ((8, 1), (4, 2), (2, 4))


def gradients(name, fields, folder, *, split, lengths=range(4, 12), **arguments):
    """Of one update on the same rows, as one vector."""
    model = build(name, **fields)
    start = {key: p.detach().clone() for key, p in model.named_parameters()}
    run(
        name,
        model,
        folder,
        data=list(uneven_rows(name, lengths)),
        per_device_train_batch_size=split[0],
        gradient_accumulation_steps=split[1],
        train_sampling_strategy="sequential",
        **PLAIN_SGD | arguments,
    )
    moved = [(start[key] - p.detach()).flatten() for key, p in model.named_parameters()]
    return torch.cat(moved).double()


def difference(one, other):
    return float((one - other).norm() / one.norm())


@pytest.mark.parametrize(
    ("name", "smoothing"), [*((name, 0.0) for name in CLASSES), ("gpt2", 0.1), ("t5", 0.1)]
)
def test_z_loss_of_an_accumulated_batch_is_that_of_its_tokens(name, smoothing, tmp_path):
    whole, *others = (
        gradients(name, Z_LOSS, tmp_path, split=split, label_smoothing_factor=smoothing)
        for split in SPLITS
    )
    for other in others:
        assert difference(whole, other) < 2e-6


@pytest.mark.parametrize("name", CLASSES)
def test_budget_loss_of_an_accumulated_batch_is_that_of_its_tokens(name, tmp_path):
    """Where every two rows cost the same, though they have not the same labels."""
    whole, *others = (
        gradients(name, {"cct_budgets": [0.25]}, tmp_path, split=split, lengths=(11, 7))
        for split in SPLITS
    )
    for other in others:
        assert difference(whole, other) < 2e-6


@pytest.mark.parametrize(
    ("fields", "bound"), [({"attention_type": "moa"}, 2e-3), ({"cct_budgets": [0.25]}, 3e-2)]
)
def test_other_losses_of_micro_batches_are_estimates(fields, bound, tmp_path):
    """The balance loss, and the budget loss of rows that cost differently: how much they are off."""
    whole, other = (gradients("t5", fields, tmp_path, split=split) for split in SPLITS[::2])
    assert 1e-6 < difference(whole, other) < bound


def test_loss_function_of_the_user_has_them_by_tokens_too(tmp_path):
    def token_mean(outputs, labels, num_items_in_batch=None):
        total = torch.nn.functional.cross_entropy(
            outputs["logits"].flatten(0, 1), labels.flatten(), reduction="sum"
        )
        return total / num_items_in_batch

    class WithFunction(MoaTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs, compute_loss_func=token_mean)

    expected = gradients("bert-lm", Z_LOSS, tmp_path, split=(8, 1))
    for split in SPLITS[::2]:
        actual = gradients("bert-lm", Z_LOSS, tmp_path, split=split, trainer_class=WithFunction)
        assert difference(expected, actual) < 2e-6


def test_tokens_that_count():
    ids, mask = torch.ones(2, 4, dtype=torch.long), torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])
    labels = torch.tensor([[5, -100, 5, -100, -100], [-100] * 5])

    def count(**batch):
        return count_tokens(batch, is_encoder_decoder=False).tolist()

    assert count(input_ids=ids) == count(inputs_embeds=torch.ones(2, 4, 3)) == [8]
    assert count(input_ids=ids, attention_mask=mask) == [4]
    assert count(input_ids=ids, attention_mask=torch.ones(2, 1, 4, 4)) == [8]
    assert count_tokens({"pixel_values": ids}, is_encoder_decoder=False) is None

    def decoder(**batch):
        found = count_tokens({"input_ids": ids, "attention_mask": mask, **batch},
                             is_encoder_decoder=True)  # fmt: skip
        assert found[0] == 4
        return int(found[1])

    assert decoder(labels=labels) == decoder(labels=labels, decoder_input_ids=labels) == 3
    assert decoder(labels=torch.tensor([0, 1])) == decoder(labels=torch.ones(2, 3)) == 4
    assert decoder(decoder_input_ids=labels) == 10
    assert decoder(decoder_input_ids=labels, decoder_attention_mask=(labels > 0)) == 2
    assert decoder(labels=labels, decoder_padding_mask=torch.ones(2, 5) > 0) == 10
