"""`evaluate_budgets` on a model whose compute fractions are known exactly."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from launching import launch_ranks
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainingArguments
from transformers.modeling_outputs import ModelOutput

from hf_moa import (
    MoaBertConfig,
    MoaBertForSequenceClassification,
    MoaT5Config,
    MoaT5ForConditionalGeneration,
)
from hf_moa.training import (
    MoaSeq2SeqTrainer,
    MoaSeq2SeqTrainingArguments,
    evaluate_budgets,
    format_budget_table,
)

# Means over 5 sequences, in batches of 2, 2 and 1: a mean of batch means would differ.
WORK = [0.1, 0.2, 0.3, 0.4, 1.0]
MEAN_WORK = 0.4


@dataclass
class FakeOutput(ModelOutput):
    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    compute_fraction: torch.Tensor | None = None


class FakeCCTModel(torch.nn.Module):
    """Spends `budget * work` on a sequence and notes every budget it is set to."""

    def __init__(self, cct_budgets=(0.5, 1, 1, 0.25)):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.config = SimpleNamespace(
            cct_budgets=cct_budgets, keys_to_ignore_at_inference=["compute_fraction"]
        )
        self.set_to = []
        self.batch_sizes = []

    def set_budget(self, budget):
        if budget is not None and budget not in self.config.cct_budgets:
            raise ValueError(f"budget must be one of {self.config.cct_budgets} (got {budget!r}).")
        self.set_to.append(budget)

    def forward(self, work, labels=None):
        self.batch_sizes.append(len(work))
        budget = self.set_to[-1]
        budget = sum(budget) / 2 if isinstance(budget, tuple) else budget
        logits = torch.stack([work - budget, budget - work], dim=-1)
        return FakeOutput(loss=self.weight.sum() + budget, logits=logits, compute_fraction=work * budget)


def make_trainer(model, tmp_path, **kwargs):
    args = TrainingArguments(
        output_dir=str(tmp_path), per_device_eval_batch_size=2, disable_tqdm=True, use_cpu=True
    )
    data = [{"work": torch.tensor(work), "labels": torch.tensor(1)} for work in WORK]
    kwargs = {"eval_dataset": data, **kwargs}
    return Trainer(model=model, args=args, compute_metrics=accuracy, **kwargs)


def accuracy(prediction):
    assert prediction.predictions.shape == (5, 2)  # neither a tuple nor the warm-up batch
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def test_each_budget_once_and_largest_first(tmp_path):
    model = FakeCCTModel()
    rows = evaluate_budgets(make_trainer(model, tmp_path))
    assert [row["budget"] for row in rows] == [1, 0.5, 0.25]
    assert [row["compute_fraction"] for row in rows] == pytest.approx(
        [MEAN_WORK, MEAN_WORK / 2, MEAN_WORK / 4]
    )
    # Class 1 wherever work < budget; a tie goes to class 0.
    assert [row["eval_accuracy"] for row in rows] == pytest.approx([0.8, 0.8, 0.4])
    assert [row["eval_loss"] for row in rows] == pytest.approx([1, 0.5, 0.25])
    assert all(row["seconds"] > 0 for row in rows)
    assert set(rows[0]) == {
        "budget",
        "compute_fraction",
        "seconds",
        "eval_loss",
        "eval_accuracy",
    }


def test_one_batch_warms_up_each_budget_and_does_not_count(tmp_path):
    model = FakeCCTModel()
    evaluate_budgets(make_trainer(model, tmp_path), budgets=[1, 0.5])
    assert model.batch_sizes == [2, 2, 2, 1] * 2


@pytest.mark.parametrize("own", [False, True])
def test_trainer_is_afterwards_as_it_was(tmp_path, own):
    """A method bound to itself would hold it, and its model, in memory."""
    trainer = make_trainer(FakeCCTModel(), tmp_path)
    if own:
        trainer.prediction_step = step = trainer.prediction_step
    evaluate_budgets(trainer, budgets=[1])
    assert ("prediction_step" in vars(trainer)) == own
    if own:
        assert trainer.prediction_step is step


def test_given_dataset_budgets_and_prefix(tmp_path):
    model = FakeCCTModel()
    data = [{"work": torch.tensor(0.5), "labels": torch.tensor(1)}] * 5
    trainer = make_trainer(model, tmp_path, eval_dataset=None)
    rows = evaluate_budgets(trainer, data, budgets=[0.5], metric_key_prefix="test")
    assert rows[0]["compute_fraction"] == pytest.approx(0.25)
    assert rows[0]["test_accuracy"] == 0.0
    assert model.set_to == [0.5, None]


def test_pairs_of_budgets_are_ordered_by_their_sum(tmp_path):
    model = FakeCCTModel(cct_budgets=[(0.5, 0.5), (0.25, 1.0), (1.0, 1.0)])
    rows = evaluate_budgets(make_trainer(model, tmp_path))
    assert [row["budget"] for row in rows] == [(1.0, 1.0), (0.25, 1.0), (0.5, 0.5)]
    assert rows[1]["compute_fraction"] == pytest.approx(MEAN_WORK * 0.625)


def test_budget_is_restored_after_an_error(tmp_path):
    model = FakeCCTModel()
    trainer = make_trainer(model, tmp_path)
    with pytest.raises(ValueError, match=r"budget must be one of .* \(got 0\.3\)"):
        evaluate_budgets(trainer, budgets=[1, 0.3])
    assert model.set_to[-1] is None
    assert not model._forward_hooks
    assert trainer.compute_metrics is accuracy


def test_model_without_cct_is_an_error(tmp_path):
    trainer = make_trainer(FakeCCTModel(cct_budgets=None), tmp_path)
    with pytest.raises(ValueError, match=r"needs a model with budgets .*FakeCCTModel"):
        evaluate_budgets(trainer)


def test_one_dataset_and_at_least_one_budget_are_needed(tmp_path):
    trainer = make_trainer(FakeCCTModel(), tmp_path, eval_dataset=None)
    with pytest.raises(ValueError, match=r"`eval_dataset` must be one dataset.*got None"):
        evaluate_budgets(trainer)
    with pytest.raises(ValueError, match=r"`eval_dataset` must be one dataset.*got a dict"):
        evaluate_budgets(trainer, {"matched": [], "mismatched": []})
    with pytest.raises(ValueError, match=r"`budgets` must name at least one of \[1, 0\.5, 0\.25\]"):
        evaluate_budgets(trainer, [{}], budgets=[])


def test_output_without_compute_fraction_is_an_error(tmp_path):
    class Silent(FakeCCTModel):
        def forward(self, work, labels=None):
            output = super().forward(work, labels)
            return FakeOutput(loss=output.loss, logits=output.logits)

    with pytest.raises(ValueError, match="Silent returned no `compute_fraction`"):
        evaluate_budgets(make_trainer(Silent(), tmp_path))


def real_model(**fields):
    config = MoaBertConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        **fields,
    )
    return MoaBertForSequenceClassification(config).eval()


def test_fractions_of_a_real_model_are_those_of_its_forward_pass(tmp_path):
    torch.manual_seed(0)
    model = real_model(cct_budgets=[1.0, 0.5])
    ids = torch.randint(1, 50, (5, 8))
    data = [{"input_ids": row, "labels": torch.tensor(1)} for row in ids]
    rows = evaluate_budgets(make_trainer(model, tmp_path, eval_dataset=data))
    assert [row["budget"] for row in rows] == [1.0, 0.5]
    for row in rows:
        with torch.no_grad():
            fractions = model(ids, budget=row["budget"]).compute_fraction
        assert fractions.shape == (5,)
        assert row["compute_fraction"] == pytest.approx(fractions.mean().item())
    assert rows[0]["compute_fraction"] != rows[1]["compute_fraction"]


class FakeGeneratingModel(FakeCCTModel):
    """Stands for a search: calls itself with two rows for each sequence, once for each tenth of the
    first one's work, so that processes differ in how often."""

    def forward(self, work, labels=None):
        for _ in range(round(10 * work[0].item())):
            self.search(work.repeat_interleave(2))
        return FakeOutput(loss=self.weight.sum(), logits=torch.stack([work, -work], dim=-1))

    def search(self, work):
        output = super().forward(work)
        for hook in self._forward_hooks.values():
            hook(self, (), output)


def test_every_row_of_a_search_counts(tmp_path):
    [row] = evaluate_budgets(make_trainer(FakeGeneratingModel(), tmp_path), budgets=[1])
    # once the batch of 0.1 and 0.2, three times that of 0.3 and 0.4, ten times that of 1
    assert row["compute_fraction"] == pytest.approx((0.3 + 3 * 0.7 + 10 * 1) / (2 + 3 * 2 + 10))


@pytest.mark.slow
def test_two_processes_count_every_sequence_once(tmp_path):
    """Five sequences on two processes: three are repeated to fill the last batches."""
    launch_ranks(2, __file__, tmp_path)
    for rank in range(2):
        world_size, rows, [searched] = json.loads((tmp_path / f"rows-{rank}.json").read_text())
        assert world_size == 2
        assert [row["compute_fraction"] for row in rows] == pytest.approx([0.4, 0.2, 0.1])
        expected = (0.3 + 3 * 0.7 + 10 * 1) / (2 + 3 * 2 + 10)
        assert searched["compute_fraction"] == pytest.approx(expected)


@pytest.mark.parametrize("with_labels", [True, False])
def test_what_an_adapted_model_generates_counts(tmp_path, with_labels):
    def make_model():
        torch.manual_seed(0)
        sizes = {"vocab_size": 20, "d_model": 16, "d_kv": 4, "num_heads": 4, "d_ff": 16, "num_layers": 1}
        config = MoaT5Config(**sizes, decoder_start_token_id=0, cct_budgets=[1.0, 0.5])
        return MoaT5ForConditionalGeneration(config)

    torch.manual_seed(1)
    data = [{"input_ids": torch.randint(3, 20, (6,))} for _ in range(5)]
    if with_labels:
        data = [row | {"labels": torch.randint(3, 20, (4,))} for row in data]
    args = MoaSeq2SeqTrainingArguments(
        str(tmp_path),
        per_device_eval_batch_size=2,
        predict_with_generate=True,
        generation_max_length=6,
        use_cpu=True,
        disable_tqdm=True,
    )
    lora = LoraConfig(task_type="SEQ_2_SEQ_LM", target_modules=["q"])
    found = []
    for model in (make_model(), get_peft_model(make_model(), lora)):
        trainer = MoaSeq2SeqTrainer(model=model, args=args, eval_dataset=data)
        found.append(evaluate_budgets(trainer)[1]["compute_fraction"])
    assert 0 < found[0] < 1
    assert found[1] == found[0]


def test_table_is_markdown():
    rows = [
        {"budget": 1.0, "compute_fraction": 0.98765432, "seconds": 12.3456, "eval_f1": 0.5},
        {"budget": (0.5, 0.25), "compute_fraction": 0.4, "seconds": 0.001},
    ]
    assert format_budget_table(rows).splitlines() == [
        "| budget | compute_fraction | seconds | eval_f1 |",
        "|---|---|---|---|",
        "| 1 | 0.9877 | 12.35 | 0.5 |",
        "| (0.5, 0.25) | 0.4 | 0.001 |  |",
    ]
    with pytest.raises(ValueError, match="`rows` must hold at least one row"):
        format_budget_table([])


if __name__ == "__main__":  # one process of `test_two_processes_count_every_sequence_once`
    folder = Path(sys.argv[1])
    trainer = make_trainer(FakeCCTModel(), folder)
    searched = evaluate_budgets(make_trainer(FakeGeneratingModel(), folder), budgets=[1])
    answer = json.dumps([trainer.args.world_size, evaluate_budgets(trainer), searched])
    (folder / f"rows-{trainer.args.process_index}.json").write_text(answer)


@pytest.mark.parametrize(
    ("share", "said"), [(1.0, "1.00 at budget 0.5, 1.00 at budget 0.25"), (0.3, "")]
)
def test_gates_that_compute_too_much_are_warned_of(share, said, tmp_path, caplog):
    model = real_model(cct_budgets=[1.0, 0.5, 0.25])
    model.set_cct_gates(share)
    data = [{"input_ids": row, "labels": torch.tensor(1)} for row in torch.randint(1, 50, (5, 64))]
    evaluate_budgets(make_trainer(model, tmp_path, eval_dataset=data))
    messages = [record.message for record in caplog.records if "more than 0.1 above" in record.message]
    assert len(messages) == bool(said)
    assert all(said in message and "cct_budget_loss_coef" in message for message in messages)
