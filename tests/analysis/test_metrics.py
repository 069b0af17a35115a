import math

import pytest
import torch
from families import CASE

from hf_moa.analysis import budget_metrics, evaluate, expert_selection


def batches(case, labels=None):
    for seed in (0, 1):
        batch = dict(case.inputs(seed=seed))
        batch.pop("decoder_input_ids", None)
        if labels is None:
            batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        else:
            batch["labels"] = torch.tensor(labels[seed])
        yield batch


@pytest.mark.parametrize("name", ["BertForMaskedLM", "GPT2LMHeadModel", "T5ForConditionalGeneration"])
def test_loss_is_the_mean_over_all_labels(name):
    case = CASE[name]
    model = case.build(attention_type="mae")
    first, second = batches(case)
    second = {key: value[:1] for key, value in second.items()}  # batches of unequal size
    total, count = 0.0, 0
    for batch in (first, second):
        logits = model(**batch).logits.double()
        labels = batch["labels"]
        if name.startswith("GPT2"):
            logits, labels = logits[:, :-1], labels[:, 1:]
        real = labels != -100
        total += torch.nn.functional.cross_entropy(logits[real], labels[real], reduction="sum").item()
        count += int(real.sum())
    found = evaluate(model, [first, second])
    assert found["loss"] == pytest.approx(total / count, rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-4)
    assert "accuracy" not in found


def test_accuracy_of_a_classifier_at_each_budget():
    case = CASE["BertForSequenceClassification"]
    model = case.build(cct_budgets=[1, 0.5])
    labels = [[0, 1, 2], [2, 1, 0]]
    table = budget_metrics([1.0, 0.5], lambda b: evaluate(model, batches(case, labels), budget=b))
    for row in table.to_dict(orient="records"):
        guesses = [model(**b, budget=row["budget"]).logits.argmax(-1) for b in batches(case, labels)]
        right = sum(int((g == torch.tensor(k)).sum()) for g, k in zip(guesses, labels, strict=True))
        assert row["accuracy"] == pytest.approx(right / 6)


def test_rows_of_a_classifier_without_a_label_do_not_count():
    case = CASE["BertForSequenceClassification"]
    model = case.build()
    labels = [[0, -100, 2], [-100, -100, 0], [-100, -100, -100]]
    batch = case.inputs()
    given = [{**batch, "labels": torch.tensor(each)} for each in labels]
    logits = model(**batch).logits
    losses = torch.nn.functional.cross_entropy(logits[[0, 2, 2]], torch.tensor([0, 2, 0]))
    assert evaluate(model, given)["loss"] == pytest.approx(losses.item())


def test_accuracy_of_tokens_leaves_padding_out():
    case = CASE["BertForTokenClassification"]
    model = case.build(attention_type="mae").train()
    batch = {**case.inputs(), **case.labels()}
    found = evaluate(model, [batch])
    assert model.training
    real = batch["labels"] != -100
    right = model.eval()(**batch).logits.argmax(dim=-1) == batch["labels"]
    assert found["accuracy"] == pytest.approx(right[real].double().mean().item())
    assert "perplexity" not in found


def test_a_regression_has_no_accuracy():
    case = CASE["BertForSequenceClassification"]
    model = case.build(attention_type="mae", num_labels=1)
    assert set(evaluate(model, batches(case, [[0, 1, 2], [0, 0, 1]]))) == {"loss"}


def test_expert_selection_measures_each_and_leaves_the_model_as_it_was():
    case = CASE["BertForMaskedLM"]
    model = case.build(attention_type="mae")
    model.set_expert_selection("random")
    torch.manual_seed(0)
    table = expert_selection(model, lambda: evaluate(model, batches(case)), draws=3)
    assert model.bert.encoder.layer[1].attention.self.mixture.selection == "random"
    rows = table.set_index("experts")
    for name, selection in (("mixture", None), ("argmax", "argmax")):
        model.set_expert_selection(selection)
        assert rows["loss"][name] == pytest.approx(evaluate(model, batches(case))["loss"])
    assert len({round(loss, 6) for loss in rows["loss"]}) == 3
    assert rows["loss std"]["random"] > 0
    assert math.isnan(rows["loss std"]["mixture"])


def test_selection_is_put_back_after_an_error():
    model = CASE["BertForMaskedLM"].build(attention_type="mae")
    with pytest.raises(KeyboardInterrupt):
        expert_selection(model, lambda: (_ for _ in ()).throw(KeyboardInterrupt()))
    assert model.bert.encoder.layer[0].attention.self.mixture.selection is None


def test_bad_input_is_refused():
    model = CASE["BertForMaskedLM"].build()
    with pytest.raises(ValueError, match="draws must be at least 1"):
        expert_selection(model, dict, draws=0)
    with pytest.raises(ValueError, match="attention_type='mae'"):
        expert_selection(model, dict)
    with pytest.raises(ValueError, match="every batch must hold labels"):
        evaluate(model, [CASE["BertForMaskedLM"].inputs()])
    with pytest.raises(ValueError, match="at least one label"):
        evaluate(model, [])
