"""Tables of cards, and the numbers in them."""

import math

import pytest
import torch
from cards import BUDGET_ROWS, LOG, evaluation, full_card, sections
from families import CASE

from hf_moa.analysis import analyze
from hf_moa.expert_load import expert_load_in
from hf_moa.model_card import MeanExpertLoad, eval_results
from hf_moa.run_results import budget_table, final_metrics, history_of, in_words, named_metrics


def test_speed_up_is_over_the_largest_budget():
    assert budget_table(BUDGET_ROWS).splitlines() == [
        "| budget | compute fraction | accuracy | seconds | speed-up |",
        "|---|---|---|---|---|",
        "| 0.5 | 0.48 | 0.8 | 1 | 1.50x |",
        "| 1 | 1 | 0.9 | 1.5 | 1.00x |",
    ]


def test_sizes_and_speeds_of_a_part_are_no_metrics():
    entry = {
        "eval_accuracy_mm": 0.5, "eval_runtime_mm": 0.1, "eval_samples_mm": 20,
        "eval_loss_at_0.5": 1.5, "eval_tokens_at_1_0.5": 30, "eval_tokens": 30, "predict_tokens": 9,
        "predict_words": 8, "predict_lines": 2, "predict_word_perplexity": 70.0,
    }  # fmt: skip
    assert named_metrics(entry) == [
        ("eval", "accuracy_mm", 0.5),
        ("eval", "loss_at_0.5", 1.5),
        ("predict", "word_perplexity", 70.0),
    ]


def test_columns_of_metrics_are_named_in_words():
    rows = [{"budget": 1, "eval_bleu": 30.0, "eval_exact_match": 0.5}]
    assert budget_table(rows).splitlines()[0] == "| budget | compute fraction | BLEU | exact match |"
    found = named_metrics({"eval_mm_bleu": 30.0, "eval_mm_runtime": 1.0, "exact_match": 0.5})
    assert in_words(found) == {"eval mm BLEU": 30.0, "exact match": 0.5}


def test_budget_table_of_pairs_as_json_has_them():
    pairs = [
        {"budget": [1.0, 1.0], "seconds": 3.0, "eval_loss": 2.0},
        {"budget": [1.0, 0.5], "seconds": 2.0},
    ]
    assert budget_table(pairs).splitlines()[2:] == [
        "| 1, 1 |  | 2 | 3 | 1.00x |",
        "| 1, 0.5 |  |  | 2 | 1.50x |",
    ]


def test_expert_load_tells_least_most_entropy_and_shares():
    load = {"attention": [[0.25, 0.75], [0.5, 0.5]], "feed_forward": [[0.0, 1.0]]}
    entropy = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75)) / math.log(2)
    lines = sections(full_card(expert_load=load))["Expert load"].strip().splitlines()[-5:]
    assert lines == [
        "| part | layer | least | most | entropy | shares |",
        "|---|---|---|---|---|---|",
        f"| attention | 0 | 0.250 | 0.750 | {entropy:.3f} | 0.250 0.750 |",
        "| attention | 1 | 0.500 | 0.500 | 1.000 | 0.500 0.500 |",
        "| feed forward | 0 | 0.000 | 1.000 | 0.000 | 0.000 1.000 |",
    ]


@pytest.mark.parametrize(("experts", "shown"), [(16, True), (17, False)])
def test_shares_of_many_experts_are_left_out(experts, shown):
    text = sections(full_card(expert_load={"attention": [[1 / experts] * experts]}))["Expert load"]
    assert ("| shares |" in text) is shown
    assert f"| {1 / experts:.3f} | {1 / experts:.3f} | 1.000 |" in text


def test_mean_expert_load_leaves_out_layers_that_routed_nothing():
    mean = MeanExpertLoad()
    mean.add({"attention": torch.tensor([[0.5, 0.5], [1.0, 0.0]])})
    mean.add({"attention": torch.tensor([[0.0, 1.0], [0.0, 0.0]])})
    mean.add(None)
    assert mean.drain(lambda x: 3 * x) == {"attention": [[0.25, 0.75], [1.0, 0.0]]}
    assert mean.drain(lambda x: x) == {}


def test_mean_weights_of_gates_are_a_load():
    mean = MeanExpertLoad()
    encoder = (torch.tensor([[0.5, 0.5], [1.0, 0.0]]), torch.tensor([[0.0, 1.0], [0.0, 1.0]]))
    cross = (torch.tensor([[[0.25, 0.75], [0.75, 0.25]], [[1.0, 0.0], [1.0, 0.0]]]),)
    mean.add_outputs({"encoder_expert_weights": encoder, "cross_expert_weights": cross})
    assert mean.drain(lambda x: x) == {
        "encoder_MAE_gate": [[0.75, 0.25], [0.0, 1.0]],
        "cross_MAE_gate": [[0.75, 0.25]],
    }


@pytest.mark.parametrize("name", ["BertModel", "GPT2Model", "T5Model"])
def test_load_in_an_analysis_is_that_of_the_outputs(name):
    case = CASE[name]
    inputs = {key: value[:, :4] for key, value in case.inputs().items()}  # without padding
    for fields in ({"attention_type": "moa", "ffn_type": "moe"}, {"attention_type": "mae"}):
        model = case.build(**fields).eval()
        mean = MeanExpertLoad()
        mean.add_outputs(model(**inputs, output_expert_weights=True))
        tables = analyze(model, [inputs], progress=False).tables
        found = expert_load_in(tables, is_encoder_decoder=name == "T5Model")
        expected = mean.drain(lambda x: x)
        assert found.keys() == expected.keys()
        for part, layers in expected.items():
            torch.testing.assert_close(torch.tensor(found[part]), torch.tensor(layers))
    assert expert_load_in({}, is_encoder_decoder=False) == {}


def test_hyperparameters_do_not_break_their_table():
    assert "| `optimizer` | a \\| b |" in sections(full_card())["Training hyperparameters"]


def test_metrics_of_an_entry():
    entry = {
        "eval_accuracy": 0.5,
        "eval_runtime": 3.0,
        "eval_samples": 8,
        "eval_samples_per_second": 2.0,
        "eval_mm_f1": torch.tensor(0.25),
        "eval_mm_runtime": 1.0,
        "predict_bleu": 30,
        "perplexity": 12.5,
        "epoch": 1.0,
        "train_loss": 2.0,
        "train_runtime": 2.0,
        "total_flos": 7,
        "eval_matrix": torch.zeros(2),
        "eval_name": "x",
    }
    assert named_metrics(entry) == [
        ("eval", "accuracy", 0.5),
        ("eval_mm", "f1", 0.25),
        ("predict", "bleu", 30),
        ("", "perplexity", 12.5),
    ]
    results = eval_results(named_metrics(entry), task="translation", data=None)
    assert [result.metric_name for result in results] == [
        "Accuracy",
        "F1 (mm)",
        "BLEU (predict)",
        "Perplexity",
    ]


def test_final_metrics_are_those_of_the_final_weights():
    assert final_metrics(LOG, step=4) == [("eval", "accuracy", 0.5)]
    assert final_metrics(LOG, step=4, loaded_step=2) == [("eval", "accuracy", 0.25)]
    assert final_metrics([*LOG, evaluation(4, 0.75)], step=4, loaded_step=2) == [
        ("eval", "accuracy", 0.75)
    ]
    assert final_metrics(LOG[:3], step=4) == []  # measured on earlier weights
    assert final_metrics([evaluation(0, 0.125)], step=0) == [("eval", "accuracy", 0.125)]
    assert final_metrics([], step=0) == []


def test_history_is_that_of_the_training():
    assert history_of([*LOG, evaluation(4, 0.75)]) == (
        {"step": 2, "epoch": 0.5, "training loss": 2.0, "eval accuracy": 0.25},
        {"step": 4, "epoch": 1.0, "training loss": 1.0, "eval accuracy": 0.5},
    )
